# SPDX-License-Identifier: Apache-2.0
"""The train/inference mismatch check: compares vLLM's log-probs with the trainer's."""

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from peft import PeftModel

from grpo.model.attention import KERNELS, hidden_states, unwrap_peft
from grpo.model.expert_lora import update_norm, weight_norm
from grpo.model.load import evaluating
from grpo.model.packing import pack_batch
from grpo.phases import Phase
from grpo.rollout.engine import Engine, TokenRows
from grpo.rollout.weight_sync import lora_layers
from grpo.run.ending import RunFailure
from grpo.run.logs import banner_text
from grpo.settings import Settings, log


class ParityError(RunFailure):
    """vLLM and the trainer give different log-probs for the same adapter."""

    code = 3
    label = "PARITY"
    is_zipped = False


PARITY_PROMPTS, PARITY_TOKENS, PARITY_SAMPLED = 4, 256, 32  # Counts: prompts, fixed tokens of each, sampled ones.
PARITY_STRENGTH = 0.3  # Norm of the test adapter's update, as a share of the norm of the weight.
PARITY_VISIBLE = 0.01  # Nats: the check must see at least this effect of the test adapter.
# Share of a small update that may be lost or added on its way, besides four standard errors of stochastic rounding.
# With gpt-oss-20b's sizes the standard error is some 2e-4.
SHARE_LIMIT = 0.01


def check_mismatch(trainer: Any) -> None:
    """Stops before the first step unless vLLM and the trainer (a `Trainer` with an engine) give the same log-probs.

    The adapter of a fresh run is zero and would prove nothing, so a strong random one takes its place for the test.
    Fixed tokens test the engine's prefill, sampled ones its decoding. Both are repeated after a sleep and with
    another adapter: an engine that kept the first adapter fails there. The control is the trainer with its adapter
    switched off: if that agreed as well, the comparison could not see an adapter at all.

    The update of a single step is too small to change log-probs visibly. Instead, the check measures which share of
    such an update arrives in the engine's weights.

    Raises ParityError. Logs mean and maximum of |difference| in nats."""
    s: Settings = trainer.run.settings
    if s.PARITY == "off":
        log.warning(banner_text("PARITY=off: nothing checks that vLLM generates with the adapter that is trained"))
        return
    check, policy = MismatchCheck(trainer), trainer.model
    with Phase("train/inference mismatch check"), evaluating(policy), strong_adapter(policy, s.SEED) as matrices:
        for moment in ("before the first step", "after a sleep"):
            check.compare(moment)
            with torch.no_grad():
                for b in matrices:
                    b.neg_()
        if s.ROLLOUT_SYNC != "lora":  # With a native adapter there are no merged weights to compare.
            fill_with_small_update(matrices, s.LEARNING_RATE, s.SEED)
            check.compare_share()


class MismatchCheck:
    """Compares the log-probs that engine and trainer give the run's first prompts and completions of them."""

    def __init__(self, trainer: Any):
        run = trainer.run
        self.settings: Settings = run.settings
        self.engine: Engine = run.engine
        self.attention: str = run.attention
        self.results: list[dict[str, str | float]] = run.parity
        self.policy: PeftModel = trainer.model
        self.autocast = trainer.accelerator.autocast
        texts = [row.prompt for row in run.rows[:PARITY_PROMPTS]]
        self.prompts: list[list[int]] = trainer.processing_class(text=texts)["input_ids"]
        self.fixed = [row[:PARITY_TOKENS] for row in self.prompts]

    def compare(self, moment: str) -> None:
        """Compares fixed and sampled tokens with the adapter as it is. Raises ParityError."""
        s = self.settings
        self.engine.wake()
        self.engine.sync_weights(self.policy)
        scored = self.engine.score(self.fixed)
        # Nucleus sampling is off, because the trainer does not have its renormalized log-probs.
        ids, sampled = self.engine.generate(self.prompts, s.SEED, PARITY_SAMPLED, top_p=1.0)
        self.engine.sleep()
        rows = [prompt + completion for prompt, completion in zip(self.prompts, ids, strict=True)]
        for kind, figures in (
            ("fixed tokens", self.differences(scored, self.fixed, [1] * len(self.fixed), 1.0)),
            ("sampled tokens", self.differences(sampled, rows, list(map(len, self.prompts)), s.TEMPERATURE)),
        ):
            mean, control = figures["mean"], figures["control_mean"]
            shown = (moment, kind, mean, figures["max"], control)
            log.info("parity %s, %s: mean %.4f, max %.3f nats; control (adapter off) %.4f", *shown)
            self.results.append({"when": moment, "kind": kind} | figures)
            # A confident model samples tokens that no adapter changes: only fixed ones must show the control.
            problem = parity_problem(mean, control if kind == "fixed tokens" else None, s.PARITY_LIMIT)
            if problem:
                raise ParityError(f"{moment}, {kind}: {problem}. {self.difference_without_adapter()}")

    def compare_share(self) -> None:
        """Raises ParityError unless the whole update arrives in vLLM's weights."""
        self.engine.wake()
        self.engine.sync_weights(self.policy)
        self.engine.sleep()
        share, error = self.engine.sync_share or (math.nan, 0.0)
        log.info("parity of an update as small as a first step's: %.2f%% of it reach vLLM's weights", 100 * share)
        if not abs(share - 1) <= SHARE_LIMIT + 4 * error:
            raise ParityError(
                f"{100 * share:.1f}% of an update as small as a first step's reach vLLM's weights, so rollouts would "
                "follow another adapter. Please report it: no setting should do this. PARITY=off goes on all the "
                "same, USE_VLLM=0 generates with transformers"
            )

    def differences(
        self, engine_rows: Sequence[Sequence[float | None]], rows: TokenRows, first: Sequence[int], temperature: float
    ) -> dict[str, float]:
        """How far the engine's log-probs of tokens `first[i]`.. of each row are from the trainer's, in nats: mean and
        maximum, and the mean with the trainer's adapter switched off."""
        engine_logps = torch.tensor([math.nan if v is None else v for row in engine_rows for v in row])
        difference = (engine_logps - self.trainer_logps(rows, first, temperature)).abs()
        with self.policy.disable_adapter():
            control = (engine_logps - self.trainer_logps(rows, first, temperature)).abs()
        means = {"mean": difference.mean().item(), "control_mean": control.mean().item()}
        return means | {"max": difference.max().item()}

    def difference_without_adapter(self) -> str:
        """A sentence on how far both differ without an adapter: it tells whether the adapter is the cause."""
        self.engine.wake()
        self.engine.sync_weights(self.policy, active=False)
        scored = self.engine.score(self.fixed)
        self.engine.sleep()
        mean = self.differences(scored, self.fixed, [1] * len(self.fixed), 1.0)["control_mean"]
        return (
            f"Without any adapter, in both, the mean is {mean:.4f}: if that is as large, the two compute the model "
            "itself otherwise, and PARITY_LIMIT above it accepts that"
        )

    def trainer_logps(self, rows: TokenRows, first: Sequence[int], temperature: float) -> torch.Tensor:
        """The trainer's log-probs of tokens `first[i]`.. of each row, in order: (N,), float32 on the CPU."""
        base, logps = unwrap_peft(self.policy), []
        for row, start in zip(rows, first, strict=True):
            packed = pack_batch([row[:start]], [row[start:]], True, self.attention in KERNELS, base.device)
            with torch.no_grad(), self.autocast():
                states = hidden_states(base, packed, self.attention)
                logits = base.get_output_embeddings()(states).float() / temperature
            logps.append(logits.log_softmax(-1).gather(1, packed.targets[:, None])[:, 0].cpu())
        return torch.cat(logps)


@torch.no_grad()
def fill_with_small_update(matrices: Sequence[torch.Tensor], size: float, seed: int) -> None:
    """Fills matrices B with plus or minus `size` at random, as AdamW's first step does with the learning rate."""
    generator = torch.Generator().manual_seed(seed)
    for b in matrices:
        b.copy_(torch.randint(2, b.shape, generator=generator) * (2 * size) - size)


@contextlib.contextmanager
def strong_adapter(policy: torch.nn.Module, seed: int) -> Iterator[list[torch.Tensor]]:
    """Puts random matrices in place of each layer's B (out, r) and yields these. After the block, B is as before."""
    layers, generator = list(lora_layers(policy).values()), torch.Generator().manual_seed(seed)
    matrices: list[torch.Tensor] = [layer.get_parameter("lora_B.default.weight") for layer in layers]
    kept = [b.detach().clone() for b in matrices]
    try:
        with torch.no_grad():
            for layer, b in zip(layers, matrices, strict=True):
                b.copy_(torch.randn(b.shape, generator=generator))
                b.mul_(PARITY_STRENGTH * weight_norm(layer) / update_norm(layer))
        yield matrices
    finally:
        with torch.no_grad():
            for b, before in zip(matrices, kept, strict=True):
                b.copy_(before)


def parity_problem(mean: float, control: float | None, limit: float) -> str | None:
    """Why the check fails with log-probs that differ by `mean` nats, and by `control` without the adapter (None: not
    compared). None if it passes."""
    if not mean <= limit:
        return (
            f"vLLM and trainer differ by {mean:.4f} nats a token on average, PARITY_LIMIT is {limit:g}. Try the other "
            "ROLLOUT_SYNC (experts need lora), ATTN_IMPL=eager or VLLM_EAGER=1; USE_VLLM=0 generates with transformers"
        )
    if control is not None and not control > max(2 * mean, PARITY_VISIBLE):
        return (
            f"switching the adapter off changes the difference only from {mean:.4f} to {control:.4f} nats, so it "
            "cannot be told whether vLLM uses the adapter. Try the other ROLLOUT_SYNC (experts need lora), or "
            "PARITY=off if this is expected"
        )
    return None
