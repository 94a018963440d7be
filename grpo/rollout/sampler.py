# SPDX-License-Identifier: Apache-2.0
"""One interface to what writes completions: vLLM, transformers, or a choice of one token (DIRECT_ANSWERS).

Training, evaluation, scripts/ask.py and the mismatch check all sample through it.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch
from peft import PeftModel
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from grpo.data.prompts import sampling_seed
from grpo.model.attention import using_attention
from grpo.model.load import evaluating
from grpo.phases import LINE_S, Phase
from grpo.process.ranks import Ranks
from grpo.reward.episode import Episode
from grpo.rollout.decode import shared_prefill
from grpo.rollout.direct import choose_tokens, close_answers
from grpo.rollout.engine import Engine, gpu_used_gib
from grpo.settings.table import Settings

if TYPE_CHECKING:
    from grpo.data.files import Row
    from grpo.rollout.episodes import EpisodePlayer

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
Tokens = Sequence[int]


@dataclass(frozen=True)
class Sampling:
    """How completions are drawn."""

    seed: int  # of torch's global generator, from which every sampler draws
    temperature: float  # 0: always the likeliest token
    top_p: float
    max_tokens: int
    with_adapter: bool = True
    with_logps: bool = False  # Whether log-probs of the sampled tokens are wanted; only vLLM has them.
    in_turns: bool = False  # Whether prompts go in while others are answered, as an episode's turns do.


def rollout_sampling(s: Settings, step: int) -> Sampling:
    """How the completions are drawn from which the step after `step` learns."""
    seed = sampling_seed(s.SEED, step, "train")
    return Sampling(seed, s.TEMPERATURE, s.TOP_P, s.MAX_COMPLETION_LEN, with_logps=True)


def evaluation_sampling(s: Settings, step: int, greedy: bool = False, base: bool = False) -> Sampling:
    """How an evaluation draws, at EVAL_TEMPERATURE or greedily, of the `base` model without its adapter. Random numbers
    depend on SEED and `step` alone, so they are the same for every model."""
    seed, temperature = sampling_seed(s.SEED, step, "evaluation"), 0.0 if greedy else s.EVAL_TEMPERATURE
    return Sampling(seed, temperature, s.TOP_P, s.MAX_COMPLETION_LEN, with_adapter=not base)


@dataclass(frozen=True)
class Sample:
    """A completion of a prompt."""

    ids: list[int]  # the tokens, with the one that ends the completion
    logps: list[float | None] | None = None  # of each token after temperature, None for NaN; None: not known
    probabilities: Tensor | None = None  # (K,): of the run's actions at the only token, with DIRECT_ANSWERS
    episode: Episode | None = None  # with ENVIRONMENT, whose tokens are all turns and results

    @property
    def written(self) -> int:
        """The number of tokens that the model wrote."""
        return self.episode.tokens if self.episode else len(self.ids)


@dataclass(frozen=True)
class EndTokens:
    """The ids of the tokens that end a completion, and of the one that fills up rows behind it."""

    stops: Sequence[int]
    padding: int

    def has_ended(self, sample: Sample) -> bool:
        """Whether a completion ended before MAX_COMPLETION_LEN; like TRL, which takes padding for an end too. An
        episode ended if no limit cut it."""
        if sample.episode:
            return not sample.episode.is_cut
        return sample.ids[-1] in (*self.stops, self.padding)


Limits = Sequence[int | None]  # Tokens that each answer may have; None: `max_tokens` of the Sampling.


class Session(ABC):
    """Prompts go in one by one, and samples come out. Others may go in before all samples are out, as in an episode,
    whose next prompt holds the last answer."""

    is_stepwise = False  # Whether `advance` makes a step, after which others may go in, rather than all samples.

    def __init__(self) -> None:
        self.waiting: list[tuple[int, Tokens, int | None]] = []
        self.count = 0

    def submit(self, prompt: Tokens, limit: int | None = None) -> int:
        """Takes a prompt, as token ids, to be answered in at most `limit` tokens. Returns the number under which its
        sample comes out."""
        self.waiting.append((self.count, prompt, limit))
        self.count += 1
        return self.count - 1

    @abstractmethod
    def advance(self) -> Iterable[tuple[int, Sample]]:
        """Samples of prompts that went in, with their numbers."""

    def complete(self, prompts: Sequence[Tokens]) -> list[Sample]:
        """A sample of each prompt, in order. Equal prompts get a sample each."""
        numbers = list(map(self.submit, prompts))
        samples: dict[int, Sample] = {}
        while len(samples) < len(numbers):
            samples |= dict(self.advance())
        return [samples[number] for number in numbers]


class BatchSession(Session):
    """Answers all waiting prompts together."""

    def __init__(self, answer: Callable[[Sequence[Tokens], Limits], Iterable[Sample]]):
        """`answer` yields a sample of each of some prompts, in order."""
        super().__init__()
        self.answer = answer

    def advance(self) -> Iterable[tuple[int, Sample]]:
        """The samples of all prompts that wait, with their numbers."""
        if not self.waiting:
            return []
        numbers, prompts, limits = zip(*self.waiting, strict=True)
        self.waiting.clear()
        return zip(numbers, self.answer(prompts, limits), strict=True)


class EngineSession(Session):
    """vLLM's own loop: each `advance` is a step of the engine, which all prompts that wait join."""

    is_stepwise = True

    def __init__(self, engine: Engine, sampling: Sampling):
        super().__init__()
        self.engine, self.sampling, self.numbers = engine, sampling, dict[str, int]()

    def advance(self) -> Iterable[tuple[int, Sample]]:
        """The samples that one more step of the engine completes, with their numbers."""
        sampling = self.sampling
        temperature = None if sampling.with_logps else sampling.temperature
        for number, prompt, limit in self.waiting:
            request = self.engine.add(prompt, limit or sampling.max_tokens, sampling.top_p, temperature)
            self.numbers[request] = number
        self.waiting.clear()
        finished = self.engine.step() if self.numbers else []
        return [(self.numbers.pop(request), Sample(ids, logps)) for request, ids, logps in finished]


class Sampler(ABC):
    """Draws completions from a model, with its adapter or without."""

    @abstractmethod
    def session(self, sampling: Sampling) -> contextlib.AbstractContextManager[Session]:
        """Makes the model ready to sample inside the block."""

    def sample(self, prompts: Sequence[Tokens], sampling: Sampling) -> list[Sample]:
        """A sample of each prompt, in order."""
        with self.session(sampling) as session:
            return session.complete(prompts)


@dataclass
class VllmSampler(Sampler):
    """The `engine`, which sleeps while the trainer learns and gets the adapter of its `policy` for each session. Raises
    EngineError."""

    engine: Engine
    policy: PeftModel

    @contextlib.contextmanager
    def session(self, sampling: Sampling) -> Iterator[Session]:
        # After an error the engine stays as it is: the run ends, and a failed engine could not sleep anyway.
        self.engine.wake()
        self.engine.sync_weights(self.policy, sampling.with_adapter, sampling.seed)
        with engine_session(self.engine, sampling) as session:
            yield session
        self.engine.used_gib = gpu_used_gib()
        self.engine.sleep()


@dataclass
class AwakeVllmSampler(Sampler):
    """An `engine` without a trainer beside it, which stays awake, and the folder of a saved `adapter`."""

    engine: Engine
    adapter: Path | None

    @contextlib.contextmanager
    def session(self, sampling: Sampling) -> Iterator[Session]:
        self.engine.use_adapter(self.adapter if sampling.with_adapter else None)
        with engine_session(self.engine, sampling) as session:
            yield session


@contextlib.contextmanager
def engine_session(engine: Engine, sampling: Sampling) -> Iterator[Session]:
    """A session with the awake engine: all prompts as one batch, or step by step where they come in turns."""
    if not sampling.in_turns:
        yield BatchSession(lambda prompts, limits: engine_samples(engine, prompts, sampling))
        return
    with engine.stepping(sampling.seed):
        yield EngineSession(engine, sampling)


def engine_samples(engine: Engine, prompts: Sequence[Tokens], sampling: Sampling) -> Iterator[Sample]:
    """The awake engine's samples of some prompts."""
    temperature = None if sampling.with_logps else sampling.temperature
    ids, logps = engine.generate(prompts, sampling.seed, sampling.max_tokens, sampling.top_p, temperature)
    for n, tokens in enumerate(ids):
        yield Sample(tokens, logps[n] if sampling.with_logps else None)


@dataclass
class TransformersSampler(Sampler):
    """`generate` of transformers, with eager attention, which is exact at any length; `at_once` prompts at a time."""

    network: PreTrainedModel  # the gpt-oss into which PEFT puts the adapter
    policy: PeftModel | None  # the same with the adapter, if there is one
    tokenizer: PreTrainedTokenizerBase
    stops: list[int]
    at_once: int

    @contextlib.contextmanager
    def session(self, sampling: Sampling) -> Iterator[Session]:
        torch.manual_seed(sampling.seed)
        network = self.network
        attention, prefill = using_attention(network, "eager"), shared_prefill(network)
        with attention, evaluating(network), adapter_disabled(self.policy, sampling), prefill:
            yield BatchSession(lambda prompts, limits: self.generate(prompts, limits, sampling))

    @torch.no_grad()
    def generate(self, prompts: Sequence[Tokens], limits: Limits, sampling: Sampling) -> Iterator[Sample]:
        """Yields the samples of `at_once` prompts after the other."""
        lengths = [limit or sampling.max_tokens for limit in limits]
        options: dict[str, Any] = {"do_sample": False}
        if sampling.temperature:
            options |= {"do_sample": True, "temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": 0}
        options |= {"eos_token_id": self.stops, "pad_token_id": self.tokenizer.pad_token_id, "disable_compile": True}
        model: Any = self.policy or self.network  # PeftModel forwards `generate`, but its type does not say so.
        with Phase("generating", "completion", len(prompts), LINE_S) as phase:
            for start in range(0, len(prompts), self.at_once):
                rows = {"input_ids": [list(prompt) for prompt in prompts[start : start + self.at_once]]}
                batch = self.tokenizer.pad(rows, padding_side="left", return_tensors="pt").to(self.network.device)
                own = lengths[start : start + self.at_once]
                output = model.generate(**batch, **options, max_new_tokens=max(own))
                for row, length in zip(output[:, batch["input_ids"].shape[1] :].tolist(), own, strict=True):
                    end = next((n for n, token in enumerate(row) if token in self.stops), len(row))
                    yield Sample(row[: min(end + 1, length)])
                    phase.done += 1


@dataclass
class DirectSampler(Sampler):
    """The choice of one token behind each prompt (DIRECT_ANSWERS), from a pass of the learner's own model.

    `actions` are the tokens whose probabilities samples have; `token_limit` says how many tokens a pass may take, given
    the length of the longest prompt."""

    network: PreTrainedModel
    policy: PeftModel | None
    tokenizer: PreTrainedTokenizerBase
    actions: Sequence[int]
    attention: str
    token_limit: Callable[[int], int]
    share: bool = True
    autocast: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext

    @contextlib.contextmanager
    def session(self, sampling: Sampling) -> Iterator[Session]:
        torch.manual_seed(sampling.seed)
        with adapter_disabled(self.policy, sampling):
            yield BatchSession(lambda prompts, limits: self.choose(prompts, sampling.temperature))

    def choose(self, prompts: Sequence[Tokens], temperature: float) -> Iterator[Sample]:
        """Yields the answers to the prompts."""
        tokens, probabilities = self.choices(prompts, temperature, self.actions)
        for ids, chances in zip(close_answers(tokens, self.tokenizer), probabilities, strict=True):
            yield Sample(ids, None, chances)

    def choices(self, prompts: Sequence[Tokens], temperature: float, actions: Sequence[int]) -> tuple[Tensor, Tensor]:
        """What `choose_tokens` returns for these prompts and `actions`."""
        limit = self.token_limit(max(map(len, prompts), default=0))
        with self.autocast():
            return choose_tokens(self.network, prompts, actions, temperature, self.attention, limit, self.share)


def adapter_disabled(policy: PeftModel | None, sampling: Sampling) -> contextlib.AbstractContextManager[None]:
    """Turns the adapter of `policy`, if there is one, off inside the block unless `sampling` is with it."""
    return policy.disable_adapter() if policy and not sampling.with_adapter else contextlib.nullcontext()


class RankedSampler:
    """The samplers of all processes of a run as one: each takes its share of the prompts, and all get all samples."""

    def __init__(self, sampler: Sampler, ranks: Ranks):
        self.sampler, self.ranks = sampler, ranks

    def sample(self, prompts: Sequence[Tokens], group: int, sampling: Sampling) -> list[Sample]:
        """A sample of each prompt, which stands `group` times in a row. All ranks must call this. Samples of other
        ranks come without probabilities."""
        own = self.ranks.share_out(len(prompts), group)
        seeded = replace(sampling, seed=sampling.seed + self.ranks.rank)
        samples = self.sampler.sample(prompts[own.start : own.stop], seeded) if own else []
        shared = self.ranks.share([(sample.ids, sample.logps) for sample in samples])
        return [
            samples[n] if rank == self.ranks.rank else Sample(*values)
            for rank, part in enumerate(shared)
            for n, values in enumerate(part)
        ]

    def play(self, player: EpisodePlayer, rows: Sequence[Row], group: int, sampling: Sampling) -> list[Sample]:
        """Like `sample`, but an episode of each row; each process has environments of its own."""
        own = self.ranks.share_out(len(rows), group)
        seeded = replace(sampling, seed=sampling.seed + self.ranks.rank)
        samples = player.play(rows[own.start : own.stop], seeded) if own else []
        shared = self.ranks.share([(s.ids, s.logps, vars(s.episode)) for s in samples])
        return [Sample(ids, logps, episode=Episode(**record)) for part in shared for ids, logps, record in part]

    def answer(self, prompts: Sequence[Tokens], group: int, sampling: Sampling) -> list[Sample]:
        """Like `sample`, but rank 0 calls it alone, inside `run_on_rank0`, and makes the other ranks take part."""
        if not self.ranks.rank:
            self.ranks.broadcast([[list(prompt) for prompt in prompts], group, asdict(sampling)])
        return self.sample(prompts, group, sampling)

    def run_on_rank0(
        self, function: Callable[Arguments, Result], *arguments: Arguments.args, **options: Arguments.kwargs
    ) -> Result | None:
        """Calls a function on rank 0 alone, which may call `answer`. Returns the function's result on rank 0, None on
        the others. If it raises, rank 0 must end, as the others wait for it."""
        if self.ranks.rank:
            self.serve_rank0()
            return None
        result = function(*arguments, **options)
        self.ranks.broadcast()
        return result

    def serve_rank0(self) -> None:
        """On ranks other than 0, takes part in the answers that a function on rank 0 asks for, until that function
        returns. Raises RankLost with its exit code if the process of rank 0 ends instead."""
        while request := self.ranks.broadcast():
            prompts, group, sampling = request
            self.answer(prompts, group, Sampling(**sampling))
