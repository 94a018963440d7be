# SPDX-License-Identifier: Apache-2.0
"""The train/inference mismatch check: vLLM's log-probs against the trainer's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from grpo.model.attention import KERNELS, hidden_states
from grpo.model.packing import pack_batch
from grpo.rollout.engine import EngineError, lora_layers
from grpo.run.logs import banner_text
from grpo.settings import log


class ParityError(RuntimeError):
    """vLLM and the trainer give different log-probs for the same adapter."""


PARITY_PROMPTS, PARITY_TOKENS, PARITY_SAMPLED = 4, 256, 32  # prompts, fixed tokens of each, sampled tokens of each
PARITY_STRENGTH = 0.3  # of the test adapter: norm of its update against the norm of the weight


def parity_gate(trainer: Any) -> None:
    """Stop before the first step unless vLLM and the trainer give the same log-probs for the same adapter.

    The adapter of a fresh run is zero and would prove nothing, so a strong random one takes its place for the test.
    Fixed tokens test the engine's prefill, sampled ones its decoding; both again after a sleep. The control is the
    trainer with its adapter switched off: if that agreed as well, the comparison could not see an adapter at all.

    Raises ParityError. Prints mean and maximum of |difference| in nats.
    """

    run, engine = trainer.run, trainer.run.engine
    if run.settings.PARITY == "off":
        log.warning(banner_text("PARITY=off: nothing checks that vLLM generates with the adapter that is trained"))
        return
    policy = trainer.accelerator.unwrap_model(trainer.model)
    layers = lora_layers(policy)
    kept = {name: layer.lora_B["default"].weight.detach().clone() for name, layer in layers.items()}
    training = trainer.model.training
    trainer.model.eval()
    rows = trainer.processing_class(text=[row.prompt for row in run.rows[:PARITY_PROMPTS]])["input_ids"]
    fixed = [row[:PARITY_TOKENS] for row in rows]
    try:
        generator = torch.Generator().manual_seed(run.settings.SEED)
        with torch.no_grad():
            for layer in layers.values():
                weight, a, b = (
                    layer.get_base_layer().weight,
                    layer.lora_A["default"].weight,
                    layer.lora_B["default"].weight,
                )
                b.copy_(torch.randn(b.shape, generator=generator))
                update = (b.float() @ a.float()).norm() * layer.scaling["default"]
                b.mul_(PARITY_STRENGTH * weight.float().norm() / update)
        for when in ("before the first step", "after a sleep"):
            engine.wake()
            engine.hand_over(policy)
            scored = engine.score(fixed)
            # Without nucleus sampling, whose renormalized log-probs the trainer does not have.
            ids, values = engine.generate(rows, run.settings.SEED, PARITY_SAMPLED, top_p=1.0)
            engine.sleep()
            sampled, starts = [p + c for p, c in zip(rows, ids, strict=True)], list(map(len, rows))
            for kind, sequences, first, theirs, temperature in (
                ("fixed tokens", fixed, [1] * len(fixed), scored, 1.0),
                ("sampled tokens", sampled, starts, values, run.settings.TEMPERATURE),
            ):
                engines = torch.tensor([math.nan if v is None else v for row in theirs for v in row])
                ours = score_tokens(trainer, sequences, first, temperature)
                with policy.disable_adapter():
                    control = score_tokens(trainer, sequences, first, temperature)
                difference, without = (engines - ours).abs(), (engines - control).abs().mean().item()
                mean, largest = difference.mean().item(), difference.max().item()
                report = "parity %s, %s: mean %.4f, max %.3f nats; control (adapter off) %.4f"
                log.info(report, when, kind, mean, largest, without)
                run.parity.append({"when": when, "kind": kind, "mean": mean, "max": largest, "control_mean": without})
                # A confident model samples tokens that no adapter changes: the control is asked of fixed ones alone.
                control_mean = without if kind == "fixed tokens" else None
                if problem := parity_problem(mean, control_mean, run.settings.PARITY_LIMIT):
                    raise ParityError(f"{when}, {kind}: {problem}. {bare_difference(trainer, fixed)}")
            with torch.no_grad():  # another adapter for the next round: an engine that kept the first one must be seen
                for layer in layers.values():
                    layer.lora_B["default"].weight.neg_()
    finally:
        with torch.no_grad():
            for name, layer in layers.items():
                layer.lora_B["default"].weight.copy_(kept[name])
        trainer.model.train(training)


def bare_difference(trainer: Any, fixed: Sequence[Sequence[int]]) -> str:
    """How far engine and trainer are apart without any adapter: whether adapters are the matter at all."""
    engine, policy = trainer.run.engine, trainer.accelerator.unwrap_model(trainer.model)
    try:
        engine.wake()
        engine.hand_over(policy, active=False)
        scored = [value for row in engine.score(fixed) for value in row]
        engine.sleep()
    except EngineError as error:
        return f"Without an adapter they could not be compared: {error}"
    with policy.disable_adapter():
        ours = score_tokens(trainer, fixed, [1] * len(fixed), 1.0).tolist()
    mean = sum(abs(a - b) for a, b in zip(scored, ours, strict=True)) / len(ours)
    return f"Without any adapter, in both, the mean is {mean:.4f}: if that is as large, the two compute the model itself otherwise, and PARITY_LIMIT above it accepts that"


PARITY_VISIBLE = 0.01  # nats: least effect of the test adapter that the gate must see


def parity_problem(mean: float, control: float | None, limit: float) -> str | None:
    """Why log-probs that differ by `mean` nats, and by `control` without the adapter, are not good enough; or None.

    `control` None: not asked for.
    """
    if not mean <= limit:
        return (
            f"vLLM and trainer differ by {mean:.4f} nats a token on average, PARITY_LIMIT is {limit:g}. Try the other "
            "ROLLOUT_SYNC, ATTN_IMPL=eager or VLLM_EAGER=1; USE_VLLM=0 generates with transformers"
        )
    if control is not None and not control > max(2 * mean, PARITY_VISIBLE):
        return (
            f"switching the adapter off changes the difference only from {mean:.4f} to {control:.4f} nats, so it cannot be "
            "told whether vLLM uses the adapter. Try the other ROLLOUT_SYNC, or PARITY=off if this is expected"
        )
    return None


def score_tokens(trainer: Any, rows: Sequence[Sequence[int]], first: Sequence[int], temperature: float) -> Any:
    """The trainer's log-probs of tokens `first[i]`.. of each row, one after the other, float32 on the CPU."""

    base = trainer.accelerator.unwrap_model(trainer.model).get_base_model()
    attention, scores = trainer.run.attention, []
    for row, start in zip(rows, first, strict=True):
        layout = pack_batch([row[:start]], [row[start:]], True, attention in KERNELS, base.device)
        with torch.no_grad(), trainer.accelerator.autocast():
            logits = base.get_output_embeddings()(hidden_states(base, layout, attention)).float() / temperature
        scores.append(logits.log_softmax(-1).gather(1, layout.targets[:, None])[:, 0].cpu())
    return torch.cat(scores)
