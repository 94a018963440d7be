# SPDX-License-Identifier: Apache-2.0
"""The train/inference mismatch check: vLLM's log-probs against the trainer's."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from grpo.model.attention import KERNELS, hidden_states
from grpo.model.expert_lora import base_norm, update_norm
from grpo.model.load import evaluating
from grpo.model.packing import pack_batch
from grpo.phases import Phase
from grpo.rollout.engine import EngineError, Rows
from grpo.rollout.weight_sync import lora_layers
from grpo.run.ending import RunFailure
from grpo.run.logs import banner_text
from grpo.settings import log


class ParityError(RunFailure):
    """vLLM and the trainer give different log-probs for the same adapter."""

    code = 3
    label = "PARITY"
    is_zipped = False


PARITY_PROMPTS, PARITY_TOKENS, PARITY_SAMPLED = 4, 256, 32  # prompts, fixed tokens of each, sampled tokens of each
PARITY_STRENGTH = 0.3  # of the test adapter: norm of its update against the norm of the weight
PARITY_VISIBLE = 0.01  # nats: least effect of the test adapter that the check must see
# Of a small update that may be lost or added on its way, beside four standard errors of random rounding. With gpt-oss-20b's
# sizes the error is some 2e-4.
SHARE_LIMIT = 0.01


def check_mismatch(trainer: Any) -> None:
    """Stop before the first step unless vLLM and the trainer (a `Trainer` with an engine) give the same log-probs for the
    same adapter.

    The adapter of a fresh run is zero and would prove nothing, so a strong random one takes its place for the test.
    Fixed tokens test the engine's prefill, sampled ones its decoding; both again after a sleep and with another adapter,
    so that an engine that kept the first one is seen. The control is the trainer with its adapter switched off: if that
    agreed as well, the comparison could not see an adapter at all.

    An adapter as small as one step makes it changes no log-prob visibly: of that the share is asked that arrives in the
    engine's weights.

    Raises ParityError. Prints mean and maximum of |difference| in nats.
    """
    run, engine = trainer.run, trainer.run.engine
    s = run.settings
    if s.PARITY == "off":
        log.warning(banner_text("PARITY=off: nothing checks that vLLM generates with the adapter that is trained"))
        return
    policy = trainer.accelerator.unwrap_model(trainer.model)
    prompts = parity_prompts(trainer)
    name = "train/inference mismatch check"
    with Phase(name), evaluating(trainer.model), strong_adapter(policy, s.SEED) as matrices:
        for when in ("before the first step", "after a sleep"):
            for kind, found in compared(trainer, policy, prompts):
                mean, control = found["mean"], found["control_mean"]
                shown = (when, kind, mean, found["max"], control)
                log.info("parity %s, %s: mean %.4f, max %.3f nats; control (adapter off) %.4f", *shown)
                run.parity.append({"when": when, "kind": kind} | found)
                # A confident model samples tokens that no adapter changes: the control is asked of fixed ones alone.
                problem = parity_problem(mean, control if kind == "fixed tokens" else None, s.PARITY_LIMIT)
                if problem:
                    bare = bare_difference(trainer, [row[:PARITY_TOKENS] for row in prompts])
                    raise ParityError(f"{when}, {kind}: {problem}. {bare}")
            with torch.no_grad():
                for b in matrices:
                    b.neg_()
        if s.ROLLOUT_SYNC != "lora":  # which has no weights to compare
            make_small(matrices, s.LEARNING_RATE, s.SEED)
            engine.wake()
            engine.sync_weights(policy)
            engine.sleep()
            share, error = engine.share or (math.nan, 0.0)
            log.info("parity of an update as small as a first step's: %.2f%% of it reach vLLM's weights", 100 * share)
            if not abs(share - 1) <= SHARE_LIMIT + 4 * error:
                raise ParityError(
                    f"{100 * share:.1f}% of an update as small as a first step's reach vLLM's weights, so rollouts would "
                    "follow another adapter. Please report it: no setting should do this. PARITY=off goes on all the same, "
                    "USE_VLLM=0 generates with transformers"
                )


def compared(trainer: Any, policy: torch.nn.Module, prompts: Rows) -> Iterator[tuple[str, dict[str, float]]]:
    """The `differences` of the adapter as it is, for fixed tokens and for sampled ones; the engine wakes and sleeps."""
    s, engine = trainer.run.settings, trainer.run.engine
    fixed = [row[:PARITY_TOKENS] for row in prompts]
    engine.wake()
    engine.sync_weights(policy)
    scored = engine.score(fixed)
    # Without nucleus sampling, whose renormalized log-probs the trainer does not have.
    ids, sampled = engine.generate(prompts, s.SEED, PARITY_SAMPLED, top_p=1.0)
    engine.sleep()
    whole = [p + c for p, c in zip(prompts, ids, strict=True)]
    yield "fixed tokens", differences(trainer, scored, fixed, [1] * len(fixed), 1.0)
    yield "sampled tokens", differences(trainer, sampled, whole, list(map(len, prompts)), s.TEMPERATURE)


@torch.no_grad()
def make_small(matrices: Sequence[torch.Tensor], size: float, seed: int) -> None:
    """Fill matrices B with numbers of one size and random signs: with the learning rate, what AdamW's first step leaves."""
    generator = torch.Generator().manual_seed(seed)
    for b in matrices:
        b.copy_(torch.randint(2, b.shape, generator=generator) * (2 * size) - size)


def parity_prompts(trainer: Any) -> list[list[int]]:
    """Token ids of the run's first prompts."""
    return trainer.processing_class(text=[row.prompt for row in trainer.run.rows[:PARITY_PROMPTS]])["input_ids"]


@contextlib.contextmanager
def strong_adapter(policy: torch.nn.Module, seed: int) -> Iterator[list[torch.Tensor]]:
    """Random matrices B in place of the adapter's, which come back afterwards; yields those of all layers, (out, r)."""
    layers, generator = list(lora_layers(policy).values()), torch.Generator().manual_seed(seed)
    matrices = [layer.lora_B["default"].weight for layer in layers]
    kept = [b.detach().clone() for b in matrices]
    try:
        with torch.no_grad():
            for layer, b in zip(layers, matrices, strict=True):
                b.copy_(torch.randn(b.shape, generator=generator))
                b.mul_(PARITY_STRENGTH * base_norm(layer) / update_norm(layer))
        yield matrices
    finally:
        with torch.no_grad():
            for b, before in zip(matrices, kept, strict=True):
                b.copy_(before)


def differences(
    trainer: Any, theirs: Sequence[Sequence[Any]], rows: Rows, first: Sequence[int], temperature: float
) -> dict[str, float]:
    """How far the engine's log-probs `theirs` of tokens `first[i]`.. of each row are from the trainer's, in nats: mean and
    maximum, and the mean with the trainer's adapter switched off."""
    engines = torch.tensor([math.nan if v is None else v for row in theirs for v in row])
    ours = (engines - score_tokens(trainer, rows, first, temperature)).abs()
    with trainer.accelerator.unwrap_model(trainer.model).disable_adapter():
        control = (engines - score_tokens(trainer, rows, first, temperature)).abs()
    return {"mean": ours.mean().item(), "max": ours.max().item(), "control_mean": control.mean().item()}


def bare_difference(trainer: Any, fixed: Rows) -> str:
    """How far engine and trainer are apart without any adapter: whether adapters are the matter at all."""
    engine = trainer.run.engine
    try:
        engine.wake()
        engine.sync_weights(trainer.accelerator.unwrap_model(trainer.model), active=False)
        scored = engine.score(fixed)
        engine.sleep()
    except EngineError as error:  # the mismatch is the finding, and exit code 3: this only explains it
        return f"Without an adapter they could not be compared: {error}"
    mean = differences(trainer, scored, fixed, [1] * len(fixed), 1.0)["control_mean"]
    return f"Without any adapter, in both, the mean is {mean:.4f}: if that is as large, the two compute the model itself otherwise, and PARITY_LIMIT above it accepts that"


def parity_problem(mean: float, control: float | None, limit: float) -> str | None:
    """Why log-probs that differ by `mean` nats, and by `control` (None: not asked for) without the adapter, are not good
    enough; or None."""
    if not mean <= limit:
        return f"vLLM and trainer differ by {mean:.4f} nats a token on average, PARITY_LIMIT is {limit:g}. Try the other ROLLOUT_SYNC (experts need lora), ATTN_IMPL=eager or VLLM_EAGER=1; USE_VLLM=0 generates with transformers"
    if control is not None and not control > max(2 * mean, PARITY_VISIBLE):
        return f"switching the adapter off changes the difference only from {mean:.4f} to {control:.4f} nats, so it cannot be told whether vLLM uses the adapter. Try the other ROLLOUT_SYNC (experts need lora), or PARITY=off if this is expected"
    return None


def score_tokens(trainer: Any, rows: Rows, first: Sequence[int], temperature: float) -> torch.Tensor:
    """The trainer's log-probs of tokens `first[i]`.. of each row, one after the other: (N,), float32 on the CPU."""
    base = trainer.accelerator.unwrap_model(trainer.model).get_base_model()
    attention, scores = trainer.run.attention, []
    for row, start in zip(rows, first, strict=True):
        packed = pack_batch([row[:start]], [row[start:]], True, attention in KERNELS, base.device)
        with torch.no_grad(), trainer.accelerator.autocast():
            logits = base.get_output_embeddings()(hidden_states(base, packed, attention)).float() / temperature
        scores.append(logits.log_softmax(-1).gather(1, packed.targets[:, None])[:, 0].cpu())
    return torch.cat(scores)
