# SPDX-License-Identifier: Apache-2.0
"""TRL's own padded path on a step's batch, beside this learner."""

from __future__ import annotations

import time
from typing import Any

import torch
from trl import GRPOTrainer

from grpo.learn.trainer import Trainer
from grpo.measure.watched import weighed

ATTENTION = "flex_attention"  # of transformers, exact with sinks and the fastest of those that TRL's path can use
MICRO_BATCHES = (8, 16, 24, 32, 48, 96)  # completions, tried for TRL's path


def joined(batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, int]:
    """(ids (B, P + C), mask (B, P + C), C) of a padded batch."""
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    return ids, torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1), batch["completion_ids"].size(1)


def other_prompts(batch: dict[str, torch.Tensor], rows: int) -> dict[str, torch.Tensor]:
    """The batch with the prompts of `rows` rows further up: what a wrong prompt does is the comparison's scale."""
    return batch | {name: batch[name].roll(rows, 0) for name in ("prompt_ids", "prompt_mask")}


def adapter_gradient(model: torch.nn.Module) -> torch.Tensor:
    """The gradient of all that learns, (N,) in float32; the model is left without one."""
    gradient = torch.cat([p.grad.float().flatten() for p in model.parameters() if p.grad is not None])
    model.zero_grad(set_to_none=True)
    return gradient


def trl_learning(
    trainer: Trainer, batch: dict[str, torch.Tensor], micro: int, least: int | None = None
) -> dict[str, Any]:
    """TRL's own padded path on `batch`: the pass for old log-probs that it makes beside vLLM, then loss and backward of
    micro-batches of `micro`. Returns `weighed`'s figures with that pass's `old_s`, and the adapter's `gradient` (N,).
    `least`: only so many micro-batches, to warm up."""
    ours, model, (ids, mask, kept) = trainer.__class__, trainer.model, joined(batch)
    count = len(ids) if least is None else micro * least
    trainer.__class__, trainer.current_gradient_accumulation_steps = GRPOTrainer, max(count // micro, 1)
    try:
        with weighed() as cost:
            started = time.perf_counter()
            with torch.no_grad():
                logps, *_ = trainer._get_per_token_logps_and_entropies(
                    model, ids[:count], mask[:count], kept, batch_size=micro
                )
            torch.cuda.synchronize()
            old = time.perf_counter() - started
            for i in range(0, count, micro):
                part = {name: value[i : i + micro] if value.ndim else value for name, value in batch.items()}
                trainer._compute_loss(model, part | {"old_per_token_logps": logps[i : i + micro]}).backward()
        return cost | {"old_s": old, "gradient": adapter_gradient(model)}
    finally:
        trainer.__class__, trainer.current_gradient_accumulation_steps = ours, 1
        trainer._metrics["train"].clear()


def fastest_trl(trainer: Trainer, batch: dict[str, torch.Tensor], room: float) -> dict[str, Any]:
    """`trl_learning` with the `micro` of MICRO_BATCHES that is fastest, among those that take at most `room` GiB; the
    first one whatever it takes."""
    costs: list[dict[str, Any]] = []
    for micro in MICRO_BATCHES:
        if micro > len(batch["advantages"]):
            break
        try:
            # One micro-batch warms up, and takes as much memory as all.
            if trl_learning(trainer, batch, micro, least=1)["peak_gib"] > room and costs:
                break
            costs.append(trl_learning(trainer, batch, micro) | {"micro": micro})
        except torch.OutOfMemoryError:
            trainer.model.zero_grad(set_to_none=True)
            if not costs:
                raise
            break
    return min(costs, key=lambda cost: cost["seconds"])


def compare_gradients(trainer: Trainer, batch: dict[str, torch.Tensor]) -> dict[str, float]:
    """Relative differences (2-norm of the difference by the 2-norm) of the adapter's gradient on the first two groups
    of `batch`: this learner against TRL's path, TRL's with micro-batches of 4 against 8, and this learner with the
    prompts exchanged.

    Every completion counts to its last column, so that TRL's mean over a micro-batch is the same however it is cut; the
    importance correction, which TRL applies beside its own vLLM alone, is left out of both. Leaves the model with
    transformers' own attention and experts, as TRL's path needs it.
    """
    group = trainer.num_generations
    part = {k: v[: 2 * group] if v.ndim else v for k, v in batch.items() if torch.is_tensor(v) and "sampling" not in k}
    part["completion_mask"] = torch.ones_like(part["completion_mask"])
    part["num_items_in_batch"] = part["completion_mask"].sum().float()
    ours = []
    for rows in (part, other_prompts(part, group)):
        trainer.learn(trainer.model, rows)
        ours.append(adapter_gradient(trainer.model))
    trainer._metrics["train"].clear()
    base = trainer.accelerator.unwrap_model(trainer.model).get_base_model()
    base.set_attn_implementation(ATTENTION)
    base.set_experts_implementation("grouped_mm")
    theirs, four = (trl_learning(trainer, part, micro)["gradient"] for micro in (8, 4))
    named = zip(("difference", "wrong_prompt", "batching"), (*ours, four), strict=True)
    return {f"gradient_{name}": ((other - theirs).norm() / theirs.norm()).item() for name, other in named}


def compare_step(trainer: Trainer, batch: dict[str, torch.Tensor], ours: dict[str, float]) -> dict[str, float]:
    """Time, memory and gradients of TRL's path on W1's batch beside this learner's, by name. `ours` is what `weighed`
    says of this learner; TRL's path may take as much memory."""
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
