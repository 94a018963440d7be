#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Fine-tune gpt-oss-20b with GRPO on one GPU: one script, from CSVs of rewards to a trained LoRA adapter and a zip.

    python train_grpo.py --help                   every setting: default, unit, one sentence
    python train_grpo.py --check                  every check, the plan of the run, and a preview
    python train_grpo.py --check --card H100      the same for a card that is not here
    MODEL_ID=tiny python train_grpo.py            the whole path, in minutes on two CPU cores
    DATA='days/*.csv' python train_grpo.py        the real run, on one GPU (README.md says which)
    torchrun --nproc-per-node 2 train_grpo.py     the same run on two of them (docs/clusters.md)

Settings are environment variables. This file is the whole story: check, load gpt-oss-20b, attach the LoRA adapter,
start vLLM asleep beside it, train with TRL's GRPOTrainer, evaluate, zip. The folders of grpo/ do these
(docs/maintainers/code.md says which). Nothing heavy is imported before the preflight has passed.

What is simplified: a whole model on every GPU; by default one optimizer step per rollout, so the policy ratio is 1 and
clipping never acts (STEPS_PER_GENERATION); no reward model, only functions (rewards.py).
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from grpo.common import InputError, format_exception, log
from grpo.output.archive import write_zip
from grpo.output.best import recover_best
from grpo.output.durable import move_files, scratch_folder
from grpo.output.folder import add_record, mark_complete, prepare_run
from grpo.output.layout import ADAPTER, SETTINGS, UNFINISHED, lock_output_dir
from grpo.output.logs import start_logging
from grpo.phases import FILE_ONLY, Phase
from grpo.plan.cards import rented_machine
from grpo.plan.hub import fetch_weights
from grpo.plan.machine import Machine
from grpo.preflight.adapter import lora_options
from grpo.preflight.banner import banner
from grpo.preflight.checks import preflight, run_records
from grpo.preflight.preview import preview
from grpo.preflight.resolve import ResolvedRun
from grpo.process import ending
from grpo.process.ending import ExitCode, Finished, Outcome, StopRequest
from grpo.process.heartbeat import RankLost
from grpo.process.ranks import Ranks
from grpo.reward.calling import load_rewards
from grpo.settings.help import help_text, parse_args

if TYPE_CHECKING:
    from grpo.evaluate.progress import Progress
    from grpo.learn.trainer import Trainer


def main(arguments: Sequence[str] | None = None) -> int:
    ranks, outcome = Ranks(), Outcome(ExitCode.FAILED)
    try:
        ranks = Ranks.from_environment()  # This comes first: from here on, TRL and vLLM each see a single process.
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")  # No prompt or path is worth a UnicodeEncodeError.
        options = parse_args(arguments)
        if options.help:
            print(f"{help_text(__doc__)}\n\n{ending.exit_codes_text()}")
            return ExitCode.COMPLETE
        ranks.connect()
        outcome = check_and_run(ranks, options.check, rented_machine(options.card) if options.card else None)
    except (Exception, KeyboardInterrupt) as error:  # What comes after the run has begun, `run_to_the_end` reports.
        outcome = ending.decide_outcome(error)
        if outcome.is_fault or isinstance(error, BrokenPipeError):
            raise
        ending.print_refusal(outcome)
    finally:
        ranks.disconnect(outcome.code, outcome.reason)
    return outcome.code


def check_and_run(ranks: Ranks, only_check: bool, machine: Machine | None = None) -> Outcome:
    """Locks OUTPUT_DIR, checks the input, and starts the run unless `only_check` is set, which needs no lock. With a
    `machine` the run is planned for that one. Raises InputError if a rank has a problem: a start that is refused leaves
    nothing behind, not even the lock file."""
    lock, problem = (None, None) if only_check or ranks.rank else lock_output_dir(os.environ)
    outcome = None
    try:
        ranks.share_problem(problem)
        resolved = preflight(os.environ, machine, ranks)
        print(banner(resolved, every_setting=only_check))
        if only_check and not ranks.rank:
            print(preview(resolved))
        if resolved.problems:
            raise InputError(*resolved.problems)
        if only_check:
            print("\nEvery check passed. Nothing was started.")
            return Outcome(ExitCode.COMPLETE)
        outcome = launch(resolved)
        return outcome
    finally:
        if lock:
            lock.release(remove=outcome is None)


def launch(resolved: ResolvedRun) -> Outcome:
    """Downloads the weights and trains. Raises InputError before anything is written to OUTPUT_DIR."""
    with Phase("importing torch and transformers"):  # Heavy imports wait until the preflight has passed.
        from grpo.model.load import unseen_gpu

    state, s, ranks = resolved.state, resolved.settings, resolved.ranks
    assert resolved.files and resolved.plan  # A run that passed its checks has both.
    run = ending.StartedRun(state.folder, s, resolved.plan.micro_batch, ranks)
    ranks.on_lost = run.report_lost
    # Only one process per machine downloads.
    problem = unseen_gpu(resolved.machine) or (None if ranks.local_rank else fetch_weights(s.MODEL_ID, resolved.files))
    try:
        ranks.share_problem(problem)
    except RankLost as lost:
        return run.report_lost(lost)
    return run.run_to_the_end(lambda: train(resolved), lambda folder: write_report_and_zip(folder, s.ZIP))


def train(resolved: ResolvedRun) -> Finished:
    """Make OUTPUT_DIR ready, load gpt-oss, attach the LoRA adapter, start vLLM asleep beside it, train, evaluate, zip.
    Returns how far a run came that is complete or was interrupted; raises the error of a run that failed."""
    s, state, files, ranks = resolved.settings, resolved.state, resolved.files, resolved.ranks
    if not ranks.rank:
        prepare_run(state, s, run_records(resolved))
        recover_best(state.folder)
        start_logging(state.folder)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    import torch
    import transformers
    from peft import LoraConfig
    from trl import GRPOConfig

    from grpo.evaluate.progress import Progress
    from grpo.learn.context import RunContext
    from grpo.learn.distributed import adopt_rank0_state
    from grpo.learn.options import grpo_options
    from grpo.learn.trainer import Trainer
    from grpo.model.load import load_adapter, load_to_train
    from grpo.rollout.engine import start_engine
    from grpo.rollout.parity import check_mismatch

    assert files  # A run that passed its checks has a model.
    stop, model_path, started = StopRequest(ranks), str(files.folder), time.monotonic()
    run = RunContext(resolved, stop)
    if ranks.launched:  # A signal that comes while the model loads goes to all processes, or to none.
        stop.listen()
    log.info("\n%s\n", banner(resolved), extra=FILE_ONLY)  # `check_and_run` printed the banner already.
    if state.checkpoint:
        log.info("continuing from step %d", state.step)
    transformers.utils.logging.disable_default_handler()  # The messages of transformers go into training.log.
    transformers.utils.logging.enable_propagation()

    tokenizer, model = load_to_train(s, model_path, files.config, s.ATTN_IMPL, run.plan)
    options, output_dir = grpo_options(s, torch.cuda.is_available(), resolved.reward_specs), run.folder
    if ranks.rank:  # Only rank 0 writes into OUTPUT_DIR.
        output_dir = scratch_folder()
        options |= {"output_dir": str(output_dir), "report_to": "none"}
    progress = Progress(resolved)
    lora, config = LoraConfig(**lora_options(s)), GRPOConfig(**options)
    measure = progress.during if resolved.eval_rows else None
    trainer = Trainer(run, model, tokenizer, lora, config, load_rewards(resolved.reward_specs, s), measure)
    policy = trainer.model
    trainable = sum(p.numel() for p in policy.parameters() if p.requires_grad)
    log.info("adapter: %s trainable parameters on %s", f"{trainable:,}", s.LORA_TARGETS)
    if s.INIT_ADAPTER and not state.step:
        load_adapter(policy, s.INIT_ADAPTER)
    checkpoint = adopt_rank0_state(ranks, policy, state.checkpoint, output_dir)

    stop.listen()
    if run.plan.engine:
        run.engine = start_engine(s, run.plan.engine, model_path, trainer.eos_token_ids, policy)
        if not ranks.rank:
            add_record(run.folder, SETTINGS, {"vllm": run.engine.backends})
        check_mismatch(trainer)
    trainer.sampler.run_on_rank0(progress.before, trainer)
    stop.at_once = False  # From here on a signal waits for the end of its step and a checkpoint.
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    if ranks.rank:
        trainer.sampler.serve_rank0()  # This raises RankLost with the exit code when rank 0 has finished the run.
    return finish(trainer, progress, started)


def finish(trainer: Trainer, progress: Progress, started: float) -> Finished:
    """Saves and evaluates the trained adapter and writes the zip; runs on rank 0 alone."""
    folder, stop = trainer.run.folder, trainer.run.stop
    stop.work = "writing the run's last files"
    assert trainer.processing_class
    shutil.rmtree(unfinished := folder / UNFINISHED, ignore_errors=True)  # A killed process may have left one.
    trainer.save_model(str(unfinished))
    trainer.processing_class.save_pretrained(str(unfinished))
    move_files(unfinished, folder, ADAPTER)
    trainer.write_model_card(folder)
    if not stop.signal:
        stop.at_once = True
        with contextlib.suppress(KeyboardInterrupt):
            progress.after(trainer)
            trainer.write_model_card(folder)  # Rewritten here so that it includes the final figures.
        stop.at_once = False
    interrupted_by, steps = stop.signal, trainer.state.global_step  # A signal from here on interrupts nothing any more.
    write_report_and_zip(folder, trainer.run.settings.ZIP)
    if not interrupted_by:
        mark_complete(folder, steps)
    return Finished(folder, steps, time.monotonic() - started, interrupted_by)


def write_report_and_zip(folder: Path, contents: str = "all") -> None:
    """Writes the report and the zip of OUTPUT_DIR, with the `contents` that ZIP names. An error in the report is only
    logged."""
    with Phase("writing the report and the zip") as phase:
        try:
            # Imported here, so that without matplotlib or jinja2 only the report is missing.
            from grpo.evaluate.report import write_report

            write_report(folder)
        except Exception as error:
            command = f"python scripts/report.py {folder}"
            log.warning("no report was written (%s); try again with: %s", format_exception(error), command)
        phase.result = f"{write_zip(folder, contents).stat().st_size / 1e6:.1f} MB"


if __name__ == "__main__":
    sys.exit(ending.end_quietly(main))
