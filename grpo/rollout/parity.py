# SPDX-License-Identifier: Apache-2.0
"""The train/inference mismatch: compares vLLM's log-probs with the trainer's, before a run and while it learns."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from peft import PeftModel

from grpo.common import log
from grpo.model.attention import KERNELS, hidden_states, unwrap_peft
from grpo.model.expert_lora import update_norm, weight_norm
from grpo.model.load import evaluating
from grpo.model.packing import pack_batch
from grpo.output.logs import banner_text
from grpo.phases import Phase
from grpo.process.ending import ExitCode, RunFailure
from grpo.rollout.engine import Engine, TokenRows
from grpo.rollout.sampler import Sampling, VllmSampler
from grpo.rollout.weight_sync import lora_layers
from grpo.settings.table import Settings


class ParityError(RunFailure):
    """vLLM and the trainer give different log-probs for the same adapter."""

    code = ExitCode.MISMATCH
    label = "PARITY"
    is_zipped = False


class MismatchGrown(ParityError):
    """They do so in the middle of a run, whose finished steps are saved."""

    is_zipped = True


PARITY_PROMPTS, PARITY_TOKENS, PARITY_SAMPLED = 4, 256, 32  # Counts: prompts, fixed tokens of each, sampled ones.
# Norms of the test adapter's update, as shares of the weight's norm. The first is taken that changes the trainer's own
# log-probs by PARITY_EFFECT times the difference without an adapter: a weaker one could be missing unseen, and a much
# stronger one wrecks a trained model, whose noise then grows.
PARITY_STRENGTHS = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32)
PARITY_EFFECT, PARITY_LEAST_EFFECT = 6.0, 0.05  # ratio, nats
# The difference may be this much larger than what explains it (the trainer's own rounding, and with the test adapter
# also the difference without it): a ratio, and nats.
PARITY_GROWTH, PARITY_ALLOWANCE = 1.5, 0.01
# Share of the test adapters' effect that may be missing or too much, besides four of its standard errors. Above
# EFFECT_ERROR nothing is known.
EFFECT_LIMIT, EFFECT_ERROR = 0.03, 0.1
# Share of a small update that may be lost or added on its way, besides four standard errors of stochastic rounding.
# With gpt-oss-20b's sizes the standard error is some 2e-4.
SHARE_LIMIT = 0.01
# A run's log-probs are watched: above WATCH_GROWTH times what the check saw (at least WATCH_LEAST nats) it warns; above
# WATCH_END nats, or without log-probs for more than WATCH_UNKNOWN of the tokens, learning makes no sense.
WATCH_GROWTH, WATCH_LEAST, WATCH_END, WATCH_UNKNOWN = 3.0, 0.02, 1.0, 0.1
BASE, FIXED, SAMPLED = "without an adapter", "fixed tokens", "sampled tokens"
ADVICE = "docs/mismatch.md has figures to compare with, and what to try"


def check_mismatch(trainer: Any) -> None:
    """Stops before the first step unless vLLM and the trainer (a `Trainer` with an engine) give the same log-probs, and
    prepares `run.watch`.

    First without an adapter: how far apart are the two computations of the model itself? Beside it stands how far the
    trainer is from itself with one more rounding of everything. Then with a random adapter in place of the run's (that
    of a fresh run is zero, and would prove nothing), again after a sleep, and there with the opposite adapter, because
    an engine that kept the first one fails only then. Fixed tokens test the engine's prefill, sampled ones its
    decoding. The control is the trainer with its adapter switched off. What the adapter changes then, the engine must
    show as well, and no more than it.

    The update of a single step is too small to change log-probs visibly. Instead, the check measures which share of
    such an update arrives in the engine's weights.

    Raises ParityError. Logs mean and maximum of |difference| in nats."""
    s: Settings = trainer.run.settings
    if s.PARITY == "off":
        trainer.run.watch = MismatchWatch(s, [])
        log.warning(banner_text("PARITY=off: nothing checks that vLLM generates with the adapter that is trained"))
        return
    check, policy = MismatchCheck(trainer), trainer.model
    with Phase("train/inference mismatch check"), evaluating(policy):
        check.compare_base()
        with random_adapter(policy, s.SEED) as adapter:
            strength = check.strengthen(adapter)
            for moment, sign in (("before the first step", 1), ("after a sleep", -1)):
                adapter.set_strength(sign * strength)
                check.compare_adapter(moment)
            check.compare_effect()
            if s.ROLLOUT_SYNC != "lora":  # With a native adapter there are no merged weights to compare.
                fill_with_small_update(adapter.matrices, s.LEARNING_RATE, s.SEED)
                check.compare_share()
    trainer.run.watch = MismatchWatch(s, check.results)


class MismatchCheck:
    """Compares the log-probs that engine and trainer give the run's first prompts and completions of them."""

    def __init__(self, trainer: Any):
        run = trainer.run
        self.settings: Settings = run.settings
        self.engine: Engine = run.engine
        self.results: list[dict[str, str | float]] = run.parity
        self.policy: PeftModel = trainer.model
        self.autocast = trainer.accelerator.autocast
        texts = [row.prompt for row in run.rows[:PARITY_PROMPTS]]
        self.prompts: list[list[int]] = trainer.processing_class(text=texts)["input_ids"]
        self.fixed = [row[:PARITY_TOKENS] for row in self.prompts]
        self.base = 0.0  # Nats: the larger mean difference without an adapter, of fixed and sampled tokens.

    def compare_base(self) -> None:
        """Compares engine and trainer without an adapter. Raises ParityError."""
        means, roundings = {}, {}
        with self.policy.disable_adapter():
            for kind, engine_logps, (rows, first, temperature) in self.engine_logps(active=False):
                trainer_logps = self.trainer_logps(rows, first, temperature)
                roundings[kind] = self.rounding(trainer_logps, rows, first, temperature)
                means[kind] = self.record(BASE, kind, engine_logps, trainer_logps, roundings[kind])
        for kind, mean in means.items():
            if problem := base_problem(mean, self.settings.PARITY_LIMIT, roundings[kind]):
                raise ParityError(f"{BASE}, {kind}: {problem}")
        self.base = max(means.values())

    def strengthen(self, adapter: RandomAdapter) -> float:
        """Makes the random `adapter` so strong that the engine's noise cannot hide it; returns the strength."""
        rows, first = self.fixed, [1] * len(self.fixed)
        with self.policy.disable_adapter():
            without = self.trainer_logps(rows, first, 1.0)
        for strength in PARITY_STRENGTHS:
            adapter.set_strength(strength)
            effect = (self.trainer_logps(rows, first, 1.0) - without).abs().mean().item()
            if effect >= max(PARITY_EFFECT * self.base, PARITY_LEAST_EFFECT):
                break
        log.info("parity: a test adapter of %g of the weights changes log-probs by %.4f nats", strength, effect)
        return strength

    def compare_adapter(self, moment: str) -> None:
        """Compares fixed and sampled tokens with the adapter as it is. Raises ParityError."""
        for kind, engine_logps, (rows, first, temperature) in self.engine_logps():
            trainer_logps, without = self.trainer_logps(rows, first, temperature), None
            # A confident model samples tokens that no adapter changes: only fixed ones must show its effect.
            if kind == FIXED:
                with self.policy.disable_adapter():
                    without = self.trainer_logps(rows, first, temperature)
            rounding = self.rounding(trainer_logps, rows, first, temperature)
            mean = self.record(moment, kind, engine_logps, trainer_logps, rounding, without)
            if problem := adapter_problem(mean, self.base, rounding):
                raise ParityError(f"{moment}, {kind}: {problem}")

    def compare_effect(self) -> None:
        """Raises ParityError unless the engine shows the whole effect of the test adapters, and no more. The two are
        opposite, so what engine and trainer differ in without one counts once with either sign."""
        if problem := effect_problem(*mean_effect_share(self.results)):
            raise ParityError(f"both test adapters, {FIXED}: {problem}")

    def engine_logps(
        self, active: bool = True
    ) -> Iterator[tuple[str, torch.Tensor, tuple[TokenRows, list[int], float]]]:
        """Yields for fixed and for sampled tokens: the engine's log-probs (N,), NaN where it gave none, and what
        `trainer_logps` needs to compute the same. Not `active`: without the adapter."""
        s = self.settings
        # Nucleus sampling is off, because the trainer does not have its renormalized log-probs.
        sampling = Sampling(s.SEED, s.TEMPERATURE, 1.0, PARITY_SAMPLED, with_adapter=active, with_logps=True)
        with VllmSampler(self.engine, self.policy).session(sampling) as session:
            scored = self.engine.score(self.fixed)
            samples = session.complete(self.prompts)
        sampled = [sample.logps or [] for sample in samples]
        rows = [prompt + sample.ids for prompt, sample in zip(self.prompts, samples, strict=True)]
        for kind, values, tokens in (
            (FIXED, scored, (self.fixed, [1] * len(self.fixed), 1.0)),
            (SAMPLED, sampled, (rows, list(map(len, self.prompts)), s.TEMPERATURE)),
        ):
            yield kind, torch.tensor([math.nan if v is None else v for row in values for v in row]), tokens

    def record(
        self,
        moment: str,
        kind: str,
        engine_logps: torch.Tensor,
        trainer_logps: torch.Tensor,
        rounding: float,
        without: torch.Tensor | None = None,
    ) -> float:
        """Logs the mean |difference| of log-probs (N,) in nats and returns it. Beside it stand `rounding`, that of the
        trainer from itself, and the mean negative log-prob, as rounding shows most in unlikely tokens. `without` are
        the trainer's log-probs with its adapter off: how much of the adapter's effect does the engine show?"""
        difference = engine_logps - trainer_logps
        figures: dict[str, float] = {"mean": difference.abs().mean().item(), "max": difference.abs().max().item()}
        figures["nll"] = -trainer_logps.mean().item()
        words = f"mean {figures['mean']:.4f}, max {figures['max']:.3f} nats, of tokens at {figures['nll']:.1f} nats"
        if kind == SAMPLED:
            figures["kl"] = sampled_kl(difference).item()
            words += f", KL {figures['kl']:.5f}"
        figures["rounding"] = rounding
        words += f"; one more rounding in the trainer {rounding:.4f}"
        if without is not None:
            figures["control_mean"] = (engine_logps - without).abs().mean().item()
            figures["effect_share"], figures["effect_error"] = effect_share(difference, trainer_logps - without)
            words += f"; control (adapter off in the trainer) {figures['control_mean']:.4f}"
            words += f"; {figures['effect_share']:.1%} of the adapter's effect ({figures['effect_error']:.1%})"
        log.info("parity %s, %s: %s", moment, kind, words)
        self.results.append({"when": moment, "kind": kind} | figures)
        return figures["mean"]

    def compare_share(self) -> None:
        """Raises ParityError unless the whole update arrives in vLLM's weights, and no more than it."""
        s = self.settings
        with VllmSampler(self.engine, self.policy).session(Sampling(s.SEED, s.TEMPERATURE, s.TOP_P, PARITY_SAMPLED)):
            pass  # It syncs the weights.
        share, error = self.engine.sync_share or (math.nan, 0.0)
        log.info("parity of an update as small as a first step's: %.2f%% of it reach vLLM's weights", 100 * share)
        if not abs(share - 1) <= SHARE_LIMIT + 4 * error:
            raise ParityError(
                f"{100 * share:.1f}% of an update as small as a first step's reach vLLM's weights, so rollouts would "
                "follow another adapter. Please report it: no setting should do this. PARITY=off goes on all the "
                "same, USE_VLLM=0 generates with transformers"
            )

    def trainer_logps(self, rows: TokenRows, first: Sequence[int], temperature: float) -> torch.Tensor:
        """The trainer's log-probs of tokens `first[i]`.. of each row, in order: (N,), float32 on the CPU."""
        base, logps = unwrap_peft(self.policy), []
        for row, start in zip(rows, first, strict=True):
            packed = pack_batch([row[:start]], [row[start:]], True, self.settings.ATTN_IMPL in KERNELS, base.device)
            with torch.no_grad(), self.autocast():
                states = hidden_states(base, packed, self.settings.ATTN_IMPL)
                logits = base.get_output_embeddings()(states).float() / temperature
            logps.append(logits.log_softmax(-1).gather(1, packed.targets[:, None])[:, 0].cpu())
        return torch.cat(logps)

    def rounding(self, logps: torch.Tensor, rows: TokenRows, first: Sequence[int], temperature: float) -> float:
        """How far [nats] one more rounding moves the trainer from its own `logps` of these tokens, on average."""
        with rounded_once_more(unwrap_peft(self.policy), self.settings.SEED):
            rounded = self.trainer_logps(rows, first, temperature)
        return (rounded - logps).abs().mean().item()


@torch.no_grad()
def fill_with_small_update(matrices: Sequence[torch.Tensor], size: float, seed: int) -> None:
    """Fills matrices B with plus or minus `size` at random, as AdamW's first step does with the learning rate."""
    generator = torch.Generator().manual_seed(seed)
    for b in matrices:
        b.copy_(torch.randint(2, b.shape, generator=generator) * (2 * size) - size)


class RandomAdapter:
    """Random matrices in place of the B (out, r) of each layer's adapter."""

    @torch.no_grad()
    def __init__(self, policy: torch.nn.Module, seed: int):
        generator, layers = torch.Generator().manual_seed(seed), list(lora_layers(policy).values())
        self.matrices: list[torch.Tensor] = [layer.get_parameter("lora_B.default.weight") for layer in layers]
        self.units: list[torch.Tensor] = []  # The matrices of strength 1.
        for layer, b in zip(layers, self.matrices, strict=True):
            b.copy_(torch.randn(b.shape, generator=generator))
            self.units.append(b * (weight_norm(layer) / update_norm(layer)))

    @torch.no_grad()
    def set_strength(self, strength: float) -> None:
        """Makes the norm of each update `strength` times its weight's; negative: of the opposite adapter."""
        for b, unit in zip(self.matrices, self.units, strict=True):
            b.copy_(strength * unit)


@contextlib.contextmanager
def random_adapter(policy: torch.nn.Module, seed: int) -> Iterator[RandomAdapter]:
    """Yields a RandomAdapter of `policy`. After the block, the adapter is as before."""
    kept = {name: p.detach().clone() for name, p in policy.named_parameters() if "lora_B" in name}
    try:
        yield RandomAdapter(policy, seed)
    finally:
        with torch.no_grad():
            for name, before in kept.items():
                policy.get_parameter(name).copy_(before)


@contextlib.contextmanager
def rounded_once_more(network: torch.nn.Module, seed: int) -> Iterator[None]:
    """In the block, what each part of each layer of `network` computes is off by up to a unit in its last place, at
    random.

    That is what another order of the same sums does to it, so log-probs change as much as two right computations of
    this model on these tokens differ: far more for a trained model's unlikely tokens than for likely ones."""
    generators: dict[torch.device, torch.Generator] = {}

    def rounded(values: torch.Tensor) -> torch.Tensor:
        generator = generators.setdefault(values.device, torch.Generator(values.device).manual_seed(seed))
        noise = torch.rand(values.shape, generator=generator, device=values.device).mul_(2).sub_(1)
        return (values * (1 + torch.finfo(values.dtype).eps / 2 * noise)).to(values.dtype)

    def shift(module: torch.nn.Module, inputs: object, output: Any) -> Any:  # Attention returns its weights as well.
        return (rounded(output[0]), *output[1:]) if isinstance(output, tuple) else rounded(output)

    layers = list(network.get_submodule("model.layers").children())
    parts = [part for layer in layers for part in (*layer.children(), layer)]
    hooks = [part.register_forward_hook(shift) for part in parts]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def sampled_kl(difference: torch.Tensor) -> torch.Tensor:
    """An estimate of KL(engine || trainer) in nats a token, from the differences engine - trainer of the log-probs of
    sampled tokens: the mean of r - 1 - log r, with r the trainer's probability divided by the engine's.

    This is k3 of http://joschu.net/blog/kl-approx.html, which NeMo-RL logs as gen_kl_error."""
    return ((-difference).exp() - 1 + difference).mean()


def base_problem(mean: float, limit: float, rounding: float) -> str | None:
    """Why the check fails with log-probs that differ by `mean` nats without an adapter; one more rounding changes the
    trainer's own by `rounding`. None if it passes."""
    explained = PARITY_GROWTH * rounding
    if mean <= limit or mean <= explained:
        return None
    return (
        f"vLLM and trainer differ by {mean:.4f} nats a token on average, PARITY_LIMIT is {limit:g}, and rounding would "
        f"explain {explained:.4f}: they compute the model itself otherwise. Try ATTN_IMPL=eager or VLLM_EAGER=1; "
        f"USE_VLLM=0 generates with transformers, and a higher PARITY_LIMIT accepts the difference. {ADVICE}"
    )


def effect_share(difference: torch.Tensor, effect: torch.Tensor) -> tuple[float, float]:
    """Which share of an adapter's `effect` (N,) on the trainer's log-probs the engine's show, whose `difference` from
    them is (N,): 1 plus the sum of differences divided by the sum of effects, each in the direction of what both show
    together. Also its standard error, that of a ratio (Cochran, Sampling Techniques, chapter 6).

    Rounding in the trainer's effect alone would turn its direction its own way and pass for a missing part: 3% where it
    is a fifth of the effect, 6% where it is a third. Least squares takes it for one too, and would leave the share to a
    few tokens of large effect."""
    direction = (2 * effect + difference).sign()
    sizes, along = effect * direction, difference * direction
    slope = along.sum() / sizes.sum()
    return 1 + slope.item(), ((along - slope * sizes).square().sum().sqrt() / sizes.sum()).item()


def mean_effect_share(results: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """The mean of the shares of the adapters' effects in the check's results, and its standard error."""
    rows = [row for row in results if "effect_share" in row]
    error = math.hypot(*(row["effect_error"] for row in rows)) / len(rows)
    return sum(row["effect_share"] for row in rows) / len(rows), error


def adapter_problem(mean: float, base: float, rounding: float) -> str | None:
    """Why the check fails with log-probs that differ by `mean` nats with an adapter and by `base` without one; one more
    rounding changes the trainer's own by `rounding`, with the adapter. None if it passes."""
    limit = PARITY_GROWTH * max(base, rounding) + PARITY_ALLOWANCE
    if not mean <= limit:
        return (
            f"with the test adapter vLLM and trainer differ by {mean:.4f} nats a token on average, without any by "
            f"{base:.4f}; rounding would explain {limit:.4f}, so vLLM does not generate with the trainer's adapter. "
            f"Try the other ROLLOUT_SYNC (experts need lora); USE_VLLM=0 generates with transformers. {ADVICE}"
        )
    return None


def effect_problem(share: float, error: float) -> str | None:
    """Why the check fails if the engine shows this `share` of the adapter's effect, which is known to a standard
    `error`. None if it passes."""
    if not abs(share - 1) <= EFFECT_LIMIT + 4 * error:
        return (
            f"{share:.0%} of the test adapter's effect on the trainer shows in vLLM (standard error {error:.1%}), so "
            "it generates with a part or another multiple of the adapter. Try the other ROLLOUT_SYNC (experts need "
            f"lora); USE_VLLM=0 generates with transformers, PARITY=off goes on all the same. {ADVICE}"
        )
    if not error <= EFFECT_ERROR:
        return (
            f"the share of the test adapter's effect that vLLM shows is known to {error:.0%} only: it cannot be told "
            "whether vLLM uses the adapter. Try the other ROLLOUT_SYNC (experts need lora), or PARITY=off if this is "
            f"expected. {ADVICE}"
        )
    return None


class MismatchWatch:
    """Compares a run's mismatch with what the check saw before its first step."""

    def __init__(self, settings: Settings, results: Sequence[Mapping[str, Any]]):
        """`results`: figures of the check; none with PARITY=off, where PARITY_LIMIT stands for them."""
        self.settings = settings
        self.seen: float = max((row["mean"] for row in results), default=settings.PARITY_LIMIT)
        self.warn_above = max(WATCH_GROWTH * self.seen, WATCH_LEAST)

    def compare(self, step: int, mean: float, unknown: float) -> None:
        """Looks at the `mean` |difference| in nats of the log-probs of the tokens that a step was sampled with, and at
        the share of the tokens for which vLLM gave none. Warns, and again if it doubles; raises MismatchGrown where
        learning makes no sense, but not with PARITY=off."""
        fault = f"step {step}: vLLM's log-probs differ from the trainer's by {mean:.4f} nats a token on average"
        if unknown:
            fault += f", and {unknown:.1%} of the sampled tokens have none (NaN)"
        fault += f"; the mismatch check saw {self.seen:.4f}" if self.settings.PARITY == "on" else ""
        if self.settings.PARITY == "on" and not (mean <= WATCH_END and unknown <= WATCH_UNKNOWN):
            raise MismatchGrown(
                f"{fault}. Learning from such completions makes no sense. The steps before are saved; try "
                f"VLLM_EAGER=1 or the other ROLLOUT_SYNC, or go on with USE_VLLM=0 or PARITY=off. {ADVICE}"
            )
        if not mean <= self.warn_above or unknown:
            log.warning("%s. %s", fault, ADVICE)
            self.warn_above = max(self.warn_above, 2 * mean)
