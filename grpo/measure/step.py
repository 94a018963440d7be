# SPDX-License-Identifier: Apache-2.0
"""This learner alone, and beside TRL's own padded path on the same completions."""

from __future__ import annotations

import argparse
import contextlib
import time
from pathlib import Path

import torch
from trl import GRPOTrainer

from grpo.learn.learner import Batch
from grpo.learn.trainer import Trainer
from grpo.measure.record import Figure, Json, tabled
from grpo.measure.rollout import measure_run, run_figures
from grpo.measure.variants import Variant, policy_of, run_variants, weighed, write_result

LONGEST = 4000  # tokens of a completion
ATTENTION = "flex_attention"  # of transformers: exact with sinks, and the fastest that TRL's path can use
MICRO_BATCHES = (8, 16, 24, 32, 48, 96)  # completions, tried for TRL's path
STEP = """
w1_learn_s | s | learning from the last step's completions (W1) once more, alone
w1_learn_peak_gib | GiB | of that, allocated beyond weights and sleeping engine
long_learn_peak_gib | GiB | 16 completions of 4,000 tokens, allocated beyond weights and sleeping engine
w1_learn_trl_s | s | TRL's padded path on W1, in its fastest micro-batches within that memory: {w1_trl_micro_batch}
w1_trl_old_logps_s | s | of that, the pass for old log-probs, which TRL makes only beside vLLM
w1_trl_peak_gib | GiB | allocated beyond weights and sleeping engine
w1_speedup w1_speedup_without_pass | x | TRL's path against w1_learn_s, with and without that pass
"""


def padded_batch(trainer: Trainer, lengths: list[int]) -> Batch:
    """A step's batch as TRL pads it, (B, P) and (B, C), with random completions of these lengths after the run's first
    prompts, eight to a prompt."""
    rows, policy = trainer.run.rows, policy_of(trainer)
    prompts = [rows[i // 8 % len(rows)].prompt for i in range(len(lengths))]
    padded = trainer._tokenizer(text=prompts, padding=True, padding_side="left", return_tensors="pt")
    generator, shape = torch.Generator().manual_seed(0), (len(lengths), max(lengths))
    vocabulary = policy.get_input_embeddings().weight.shape[0]
    batch = {
        "prompt_ids": padded["input_ids"],
        "prompt_mask": padded["attention_mask"],
        "completion_ids": torch.randint(0, vocabulary, shape, generator=generator),
        "completion_mask": (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long(),
        "advantages": torch.randn(len(lengths), generator=generator),
        "num_items_in_batch": torch.tensor(float(sum(lengths))),
    }
    return {name: value.to(policy.device) for name, value in batch.items()}


def our_learning(trainer: Trainer, batch: Batch, repeats: int = 1) -> dict[str, float]:
    """The cost, as `weighed` has it, of the last of `repeats` calls of `Trainer.learn`."""
    policy = policy_of(trainer)
    for _ in range(repeats):
        torch.cuda.empty_cache()
        with weighed() as cost:
            trainer.learn(policy, batch)
        policy.zero_grad(set_to_none=True)
    trainer._metrics["train"].clear()
    return cost


def trl_learning(trainer: Trainer, batch: Batch, micro: int, only_first: bool = False) -> dict[str, float]:
    """TRL's own padded path on `batch`: the pass for old log-probs that it makes beside vLLM, then loss and backward of
    micro-batches of `micro`, or of the first one alone. Returns the cost, as `weighed` has it, with that pass's
    `old_s`; leaves the gradient in the model."""
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    count, kept = micro if only_first else len(ids), batch["completion_ids"].size(1)
    plain: GRPOTrainer = trainer
    plain.__class__, plain.current_gradient_accumulation_steps = GRPOTrainer, max(count // micro, 1)
    try:
        with weighed() as cost:
            started = time.perf_counter()
            with torch.no_grad():
                logps, *_ = plain._get_per_token_logps_and_entropies(
                    plain.model, ids[:count], mask[:count], kept, batch_size=micro
                )
            torch.cuda.synchronize()
            old_s = time.perf_counter() - started
            for i in range(0, count, micro):
                part = {name: value[i : i + micro] if value.ndim else value for name, value in batch.items()}
                plain._compute_loss(plain.model, part | {"old_per_token_logps": logps[i : i + micro]}).backward()
        return cost | {"old_s": old_s, "micro": micro}
    finally:
        plain.__class__, plain.current_gradient_accumulation_steps = Trainer, 1
        plain._metrics["train"].clear()


def fastest_trl(trainer: Trainer, batch: Batch, most_gib: float) -> dict[str, float]:
    """The cost of `trl_learning` with the one of MICRO_BATCHES that is fastest, among those that take at most
    `most_gib`; of the first one whatever it takes."""
    policy = policy_of(trainer)
    costs: list[dict[str, float]] = []
    for micro in MICRO_BATCHES:
        if micro > len(batch["advantages"]):
            break
        try:
            # One micro-batch warms up, and takes as much memory as all.
            if trl_learning(trainer, batch, micro, only_first=True)["peak_gib"] > most_gib and costs:
                break
            policy.zero_grad(set_to_none=True)
            costs.append(trl_learning(trainer, batch, micro))
        except torch.OutOfMemoryError:
            if not costs:
                raise
            break
        finally:
            policy.zero_grad(set_to_none=True)
    return min(costs, key=lambda cost: cost["seconds"])


def compare_step(trainer: Trainer, batch: Batch, ours: dict[str, float]) -> dict[str, float]:
    """Time and memory of TRL's path on a batch beside this learner's, by name. `ours` is this learner's cost, as
    `weighed` has it; TRL's path may take as much memory. Leaves the model with transformers' own attention and experts,
    as TRL's path needs it."""
    base = trainer.base_model_of(policy_of(trainer))
    base.set_attn_implementation(ATTENTION)
    base.set_experts_implementation("grouped_mm")
    trl = fastest_trl(trainer, batch, ours["peak_gib"])
    return {
        "w1_learn_trl_s": trl["seconds"],
        "w1_trl_old_logps_s": trl["old_s"],
        "w1_trl_peak_gib": trl["peak_gib"],
        "w1_trl_micro_batch": trl["micro"],
        "w1_speedup": trl["seconds"] / ours["seconds"],
        "w1_speedup_without_pass": (trl["seconds"] - trl["old_s"]) / ours["seconds"],
    }


def step_child(options: argparse.Namespace) -> int:
    """Measures one variant in this process: three steps through the entry point, learning alone, and what the options
    ask for besides."""
    with contextlib.ExitStack() as stack:
        code, watch = measure_run(options, stack, LONGEST)
        if code:
            return code
        trainer, batch, values = watch.trainer, watch.batch, watch.values(Path(options.run))
        policy_of(trainer).train()
        learning = our_learning(trainer, batch, 2)
        values |= {"w1_learn_s": learning["seconds"], "w1_learn_peak_gib": learning["peak_gib"]}
        write_result(options, options.child, values)
        if trainer.run.settings.MAX_COMPLETION_LEN >= LONGEST:
            longest = our_learning(trainer, padded_batch(trainer, [LONGEST] * 16))
            values["long_learn_peak_gib"] = longest["peak_gib"]
        write_result(options, options.child, values)
        if options.trl and trainer.run.settings.EXPERTS == "bf16":  # TRL's path cannot compute with packed experts.
            values |= compare_step(trainer, batch, learning)
    write_result(options, options.child, values, done=True)
    return 0


def step_figures(variant: Variant, values: Json, prefix: str) -> list[Figure]:
    """Figures of a variant: those of its run, and of learning."""
    return run_figures(variant, values, prefix) + tabled(STEP, values, prefix)


def bench_step(options: argparse.Namespace) -> int:
    """The variants, one after the other. Returns 1 if one fails."""
    return step_child(options) if options.child else run_variants(options, step_figures)
