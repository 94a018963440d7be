#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Does the recipe llama32_gsm8k teach a trained Llama? SmolLM2-135M-Instruct through verl's SFT, PPO and GRPO.

    python scripts/dev/verl_smollm2.py --source SmolLM2-135M-Instruct.gguf --out runs/verl-smollm2 \\
        --results docs/results/verl-smollm2-h200.json

Writes OUT/model, a plain Llama, and OUT/rows: word problems of language.py, whose held-out sentences and numbers are
others. Then it runs the stages of scripts/verl/run.py with `--recipe llama32_gsm8k`, as a user would: `sft` teaches
the form of answers and not which is right, `ppo` and `grpo` start from its model. verl validates with one greedy
answer for each held-out row, before the first step and after every twentieth; `base` validates OUT/model alone. After
each stage the JSON is written anew, with held-out accuracies, paired differences, and beside it, as .jsonl, ten answers
of each model. It needs the environment of docs/verl.md and, for a GGUF file, gguf==0.19.0.

Exit codes: 0 done, 2 a usage error; those of the program that fails.
"""

import argparse
import json
import random
import re
import shutil
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from grpo.common import ROOT, InputError, reflow
from grpo.figures.statistics import score_values
from grpo.process.ending import run_script
from scripts.dev import record
from scripts.dev.language import difference, run, scored
from scripts.dev.language_rows import TASKS
from scripts.dev.record import Figure, Json, figure, read_json, read_lines

RECIPE, RUN_SCRIPT = "llama32_gsm8k", ROOT / "scripts/verl/run.py"
PACKAGES = (*record.PACKAGES, "verl", "ray", "tensordict", "TransferQueue")
SIZES = {"train": 2000, "heldout": 400, "warmup": 3000}
EXAMPLES = 10
# As the recipe's run.sh sets them.
TASK = {
    "TASK": "gsm8k",
    "REWARDS": "gsm8k_strict",
    "SYSTEM_PROMPT": "",
    "PROMPT_TEMPLATE": '{} Let\'s think step by step and output the final answer after "####".',
}
# The recipe's own values but for these. The rates are ten times the recipe's, because the model is a tenth of its size;
# 256 rows a step of SFT would be 23 steps in two epochs. Batches are half the recipe's, with as many updates a step:
# on an H200 a step of 256 rows took 11 s and the GPU was 8 to 20% busy, as verl's work on the host grows with them. The
# sizes of micro-batches, kept activations and the memory of vLLM change the seconds, not what is learned.
SFT = "data.train_batch_size=32 trainer.total_epochs=1 trainer.save_freq=1000 optim.lr=1.0e-4"
LEARN = """data.max_prompt_length=256 data.max_response_length=64 actor_rollout_ref.actor.optim.lr=1.0e-5
    critic.optim.lr=1.0e-4 critic.ppo_micro_batch_size_per_gpu=32
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=32
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=32
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=8192 actor_rollout_ref.rollout.gpu_memory_utilization=0.1
    actor_rollout_ref.model.enable_gradient_checkpointing=false critic.model.enable_gradient_checkpointing=false
    trainer.total_epochs=1000 trainer.val_before_train=true trainer.test_freq=20"""
# The model as it came answers at greater length. Without `disable` verl would load GRPO's checkpoint into it.
BASE = """trainer.val_only=true trainer.resume_mode=disable data.max_response_length=256
    actor_rollout_ref.rollout.enforce_eager=true"""
# Stage -> the stage of run.py and its options.
STAGES = {
    "sft": ("sft", SFT),
    "ppo": ("ppo", f"{LEARN} data.train_batch_size=128 actor_rollout_ref.actor.ppo_mini_batch_size=32"),
    "grpo": ("grpo", f"{LEARN} data.train_batch_size=32 actor_rollout_ref.actor.ppo_mini_batch_size=8"),
    "base": ("grpo", f"{LEARN} {BASE}"),
}
# Figure of a stage -> verl's name of it, unit, note; first and last are means of five steps.
ENDS = {
    "reward": ("critic/score/mean", "reward", "sampled at temperature 1"),
    "entropy": ("actor/entropy", "nats", "of the policy, a token"),
    "length": ("response_length/mean", "tokens", "of an answer"),
    "cut": ("response_length/clip_ratio", "share", "answers that reached the limit"),
    "kl": ("actor/ppo_kl", "nats", "between the model of a step's answers and that of its last update"),
}
TIMES = ("step", "gen", "old_log_prob", "values", "update_critic", "update_actor", "update_weights", "testing")


def plain(turn: str) -> str:
    """The text of a turn in Harmony, without its channels.

    >>> plain("<|channel|>analysis<|message|>1 + 1 = 2.<|end|><|start|>assistant<|channel|>final<|message|>#### 2")
    '1 + 1 = 2. #### 2'
    """
    return " ".join(re.findall(r"<\|message\|>(.*?)(?=<\||\Z)", turn))


def write_rows(folder: Path, seed: int) -> None:
    """Writes train.jsonl, heldout.jsonl and warmup.jsonl; no question comes twice in a file."""
    rng = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    for part, size in SIZES.items():
        rows: dict[str, str] = {}
        while len(rows) < size:
            row, right, warmup = TASKS["stories"].draw(rng, part)
            rows[row["question"]] = plain(str(warmup if part == "warmup" else right))
        lines = ({"question": question, "answer": answer} for question, answer in rows.items())
        record.write_lines(folder / f"{part}.jsonl", lines)


def stage_command(stage: str, out: Path, steps: int, options: Sequence[str]) -> tuple[list[str | Path], dict[str, str]]:
    """The arguments of Python for a stage on one GPU, and its environment. `options` of verl win over the others."""
    name, own = STAGES[stage]
    words = [*own.split(), "trainer.logger=[console,file]"]
    if stage != "sft":
        words += [f"trainer.total_training_steps={steps}", f"trainer.save_freq={steps}"]
        words.append(f"trainer.validation_data_dir={out / 'heldout' / stage}")
    rows, model = out / "rows", out / ("model" if stage in ("sft", "base") else "verl/sft-merged")
    environ = TASK | {"MODEL_ID": str(model), "OUTPUT_DIR": str(out / "verl"), "WANDB_MODE": "offline"}
    environ["DATA"] = str(rows / ("warmup.jsonl" if stage == "sft" else "train.jsonl"))
    environ |= {"EVAL_SHARE": "0"} if stage == "sft" else {"EVAL_DATA": str(rows / "heldout.jsonl")}
    environ["VERL_FILE_LOGGER_PATH"] = str(out / "metrics" / f"{stage}.jsonl")
    return [RUN_SCRIPT, name, "--recipe", RECIPE, "--gpus", "1", *words, *options], environ


def merge_command(out: Path) -> list[str | Path]:
    """The arguments of Python that make a model of SFT's last checkpoint, as the recipe's run.sh does."""
    step = (out / "verl/sft/latest_checkpointed_iteration.txt").read_text(encoding="utf-8").strip()
    command: list[str | Path] = ["-m", "verl.model_merger", "merge", "--backend", "fsdp"]
    return [*command, "--local_dir", out / f"verl/sft/global_step_{step}", "--target_dir", out / "verl/sft-merged"]


def run_stage(stage: str, options: argparse.Namespace) -> None:
    """Runs a stage from its start, merges the model of SFT, and notes the seconds of both in OUT/stages.json."""
    out = options.out.absolute()
    (out / "metrics").mkdir(parents=True, exist_ok=True)
    (out / "metrics" / f"{stage}.jsonl").unlink(missing_ok=True)  # They would be an earlier run's.
    for folder in ("heldout", "verl"):  # verl would continue from an earlier run's checkpoint, which may have ended.
        shutil.rmtree(out / folder / stage, ignore_errors=True)
    seconds = run(*stage_command(stage, out, options.steps, [] if stage == "sft" else options.set))
    if stage == "sft":
        seconds += run(merge_command(out), {})
    noted = read_json(out / "stages.json") or {}
    (out / "stages.json").write_text(json.dumps(noted | {stage: round(seconds, 1)}), encoding="utf-8")


def validations(out: Path, stage: str) -> dict[int, list[Json]]:
    """The held-out rows that verl validated in a stage, in the order of their prompts, by step."""
    paths = sorted((out / "heldout" / stage).glob("*.jsonl"), key=lambda path: int(path.stem))
    return {int(path.stem): sorted(read_lines(path), key=lambda row: str(row["input"])) for path in paths}


def accuracy(rows: Sequence[Json]) -> Json:
    """Share of right answers with its interval over prompts, and the score of each prompt."""
    return score_values([[row["score"]] for row in rows])


def models(out: Path) -> dict[str, list[Json]]:
    """The validated held-out rows of each model: as it came, after SFT, after PPO, after GRPO."""
    base, ppo, grpo = (validations(out, stage) for stage in ("base", "ppo", "grpo"))
    rows = {"base": base.get(0), "sft": ppo.get(0) or grpo.get(0)}
    rows |= {name: steps[max(steps)] for name, steps in (("ppo", ppo), ("grpo", grpo)) if steps and max(steps)}
    return {name: validated for name, validated in rows.items() if validated}


def metrics_of(out: Path, stage: str) -> list[Json]:
    """verl's metrics of each step of a stage."""
    path = out / "metrics" / f"{stage}.jsonl"
    return [row["data"] for row in read_lines(path)] if path.exists() else []


def step_figures(stage: str, steps: Sequence[Json]) -> list[Figure]:
    """How rewards, entropy and lengths of a stage's steps went, and what a step took."""
    figures = [figure(f"{stage}.steps", len(steps), "steps")]
    for name, (key, unit, note) in ENDS.items():
        values = [row[key] for row in steps if key in row]
        for end, part in (("first", values[:5]), ("last", values[-5:])):
            if part:
                figures.append(figure(f"{stage}.{name}_{end}", statistics.fmean(part), unit, f"{note}; five steps"))
    for name in TIMES:
        values = [row[f"timing_s/{name}"] for row in steps[1:] if f"timing_s/{name}" in row]
        if values:
            figures.append(figure(f"{stage}.{name}_s", statistics.median(values), "s", "median but for the first step"))
    memory = [value for row in steps for key, value in row.items() if key.endswith("perf/max_memory_allocated_gb")]
    return figures + ([figure(f"{stage}.torch_gib", max(memory), "GiB", "torch's, in the learner")] if memory else [])


def figures_of(out: Path) -> list[Figure]:
    """The figures of all stages that have run."""
    scores = {name: accuracy(rows) for name, rows in models(out).items()}
    figures = [scored(f"accuracy.{name}", values, "one greedy answer a row") for name, values in scores.items()]
    for before, after in (("base", "sft"), ("sft", "ppo"), ("sft", "grpo"), ("ppo", "grpo")):
        if {before, after} <= scores.keys():
            name = f"gain.{after}" if before != "ppo" else "grpo_over_ppo"
            figures += difference(name, scores[before], scores[after], f"{after} minus {before}")
    for stage in ("ppo", "grpo"):
        for step, rows in validations(out, stage).items():
            figures.append(scored(f"{stage}.accuracy_step_{step}", accuracy(rows), ""))
    losses = [row for row in metrics_of(out, "sft") if "train/loss" in row]
    figures += step_figures("sft", losses) if losses else []
    for stage in ("ppo", "grpo"):
        if steps := [row for row in metrics_of(out, stage) if "timing_s/step" in row]:
            figures += step_figures(stage, steps)
    seconds: Json = read_json(out / "stages.json") or {}
    return figures + [figure(f"{name}.seconds", value, "s", "the whole stage") for name, value in seconds.items()]


def examples(out: Path) -> list[Json]:
    """Answers of each model to the same held-out prompts: the first in the order of the alphabet."""
    return [
        {"model": name, "prompt": row["input"], "completion": row["output"], "reward": row["score"]}
        for name, rows in models(out).items()
        for row in rows[:EXAMPLES]
    ]


def write_results(out: Path, results: Path) -> None:
    """Writes the figures, and beside them the answers."""
    record.write(results, figures_of(out), more={"versions": record.package_versions(PACKAGES)})
    record.write_lines(results.with_suffix(".jsonl"), examples(out))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=reflow(__doc__), formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, help="the model's folder as on the Hub, or a GGUF file; for a new OUT")
    parser.add_argument("--out", type=Path, required=True, help="folder of the model, the rows and verl's files")
    parser.add_argument("--results", type=Path, required=True, help="JSON to write")
    text = "default: all, in this order; none only writes the JSON of those that ran, also in copies of OUT"
    parser.add_argument("--stages", nargs="*", choices=STAGES, default=list(STAGES), help=text)
    parser.add_argument("--steps", type=int, default=100, help="of ppo and of grpo (default %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the rows (default %(default)s)")
    text = "a further option of verl, for all stages but sft"
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help=text)
    options = parser.parse_args(argv)
    if not (options.out / "model").exists():
        if not options.source:
            raise InputError(f"{options.out} holds no model: give --source")
        from scripts.dev.smollm2 import write_llama  # Imported here: torch takes seconds.

        write_llama(options.out / "model", options.source)
    write_rows(options.out / "rows", options.seed)
    for stage in options.stages:
        run_stage(stage, options)
        write_results(options.out, options.results)
    if not options.stages:
        write_results(options.out, options.results)
    return 0


if __name__ == "__main__":
    sys.exit(run_script(main))
