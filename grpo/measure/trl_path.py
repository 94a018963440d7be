# SPDX-License-Identifier: Apache-2.0
"""TRL's own padded path on a step's batch, beside this learner."""

from __future__ import annotations

import time

import torch
from torch import Tensor
from trl import GRPOTrainer

from grpo.learn.trainer import Batch, Trainer
from grpo.measure.watched import policy_of, weighed

ATTENTION = "flex_attention"  # of transformers: exact with sinks, and the fastest that TRL's path can use
MICRO_BATCHES = (8, 16, 24, 32, 48, 96)  # completions, tried for TRL's path


def adapter_gradient(trainer: Trainer) -> Tensor:
    """The gradient of the adapter, (N,) in float32; the model is left without one."""
    policy = policy_of(trainer)
    gradient = torch.cat([p.grad.float().flatten() for p in policy.parameters() if p.grad is not None])
    policy.zero_grad(set_to_none=True)
    return gradient


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


def compare_gradients(trainer: Trainer, batch: Batch) -> dict[str, float]:
    """Relative differences (2-norm of the difference by the 2-norm) of the adapter's gradient on the first two groups
    of `batch`: this learner against TRL's path, TRL's with micro-batches of 4 against 8, and this learner with the
    prompts exchanged, which is the comparison's scale.

    Every completion counts to its last column, so that TRL's mean over a micro-batch is the same however it is cut; the
    importance correction, which TRL applies beside its own vLLM alone, is left out of both. Leaves the model with
    transformers' own attention and experts, as TRL's path needs it.
    """
    group, policy = trainer.run.settings.NUM_GENERATIONS, policy_of(trainer)
    part = {k: v[: 2 * group] if v.ndim else v for k, v in batch.items() if torch.is_tensor(v) and "sampling" not in k}
    part["completion_mask"] = torch.ones_like(part["completion_mask"])
    part["num_items_in_batch"] = part["completion_mask"].sum().float()
    exchanged = part | {name: part[name].roll(group, 0) for name in ("prompt_ids", "prompt_mask")}
    gradients = {}
    for name, rows in (("difference", part), ("wrong_prompt", exchanged)):
        trainer.learn(policy, rows)
        gradients[name] = adapter_gradient(trainer)
    trainer._metrics["train"].clear()
    base = trainer.base_model_of(policy)
    base.set_attn_implementation(ATTENTION)
    base.set_experts_implementation("grouped_mm")
    for name, micro in (("batching", 4), ("trl", 8)):
        trl_learning(trainer, part, micro)
        gradients[name] = adapter_gradient(trainer)
    theirs = gradients.pop("trl")
    return {f"gradient_{name}": ((own - theirs).norm() / theirs.norm()).item() for name, own in gradients.items()}


def compare_step(trainer: Trainer, batch: Batch, ours: dict[str, float]) -> dict[str, float]:
    """Time, memory and gradients of TRL's path on W1's batch beside this learner's, by name. `ours` is this learner's
    cost, as `weighed` has it; TRL's path may take as much memory."""
    values = compare_gradients(trainer, batch)
    theirs = fastest_trl(trainer, batch, ours["peak_gib"])
    return values | {
        "w1_learn_trl_s": theirs["seconds"],
        "w1_trl_old_logps_s": theirs["old_s"],
        "w1_trl_peak_gib": theirs["peak_gib"],
        "w1_trl_micro_batch": theirs["micro"],
        "w1_speedup": theirs["seconds"] / ours["seconds"],
        "w1_speedup_without_pass": (theirs["seconds"] - theirs["old_s"]) / ours["seconds"],
    }
