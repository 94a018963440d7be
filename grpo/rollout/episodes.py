# SPDX-License-Identifier: Apache-2.0
"""Episodes: the model acts in an environment, turn by turn, in front of any sampler.

A turn ends at a stop token. If its last message is a call, the environment runs it, the result's tokens follow, and the
next turn begins behind them. The sequence only grows: what was sampled stays as it was sampled. An episode's next turn
begins when its last one has ended, whatever the others do: with vLLM it joins the engine after a few steps
(`EngineSession`). Samplers that take a batch wait for all environments, so that the same seed gives the same
episodes."""

from __future__ import annotations

import base64
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from transformers import PreTrainedTokenizerBase

from grpo.common import log
from grpo.data.files import Row
from grpo.data.prepare import RESET_TOO_LONG, Tools, episode_prompt
from grpo.environment.calls import Call, error_text, read_call, result_parts, special_ids, without_tokens
from grpo.environment.pool import TIMED_OUT, Environment, EnvironmentPool
from grpo.environment.worker import Reply
from grpo.phases import LINE_S, Phase
from grpo.reward.calling import RewardError
from grpo.reward.episode import Episode
from grpo.rollout.sampler import EndTokens, Sample, Sampler, Sampling, Session
from grpo.settings.table import Settings

CUT_RESULT = " ... (cut: {} of {} tokens)"


@dataclass
class Play:
    """An episode that is being played."""

    number: int
    row: Row
    environment: Environment
    request: str = "reset"  # The method of the environment that it waits for.
    asked_at: float = 0.0
    prompt: str = ""
    prompt_ids: list[int] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    learned: list[int] = field(default_factory=list)
    logps: list[float | None] | None = field(default_factory=list)  # None where the sampler knows none
    turns: list[int] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)  # of each turn's call
    has_step_rewards: bool = False
    author: str = ""  # who answers the call that runs
    end: str = ""
    counts: dict[str, int] = field(default_factory=lambda: {"calls": 0, "unread": 0, "errors": 0})
    tool_s: float = 0.0
    resets: int = 0

    def extend(self, ids: Sequence[int], logps: Sequence[float | None] | None, learned: int) -> None:
        """Adds the tokens of a turn (`learned` 1) or of a result (0), which has no log-probs."""
        self.ids += ids
        self.learned += [learned] * len(ids)
        if not learned:  # As in TRL; nothing is learned there.
            logps = [0.0] * len(ids)
        self.logps = None if self.logps is None or logps is None else [*self.logps, *logps]

    def record(self, reward: float | None = None, fault: str = "", copy: bytes = b"") -> Episode:
        """The episode as it ended."""
        return Episode(
            prompt=self.prompt,
            prompt_ids=self.prompt_ids,
            learned=self.learned,
            turns=self.turns,
            turn_rewards=self.rewards if self.has_step_rewards else None,
            reward=reward,
            end=self.end,
            fault=fault,
            tool_s=self.tool_s,
            copy=base64.b64encode(copy).decode(),
            **self.counts,
        )


@dataclass
class EpisodePlayer:
    """Plays an episode for each of some rows."""

    sampler: Sampler
    pool: EnvironmentPool
    tokenizer: PreTrainedTokenizerBase
    ends: EndTokens
    settings: Settings
    tools: Tools  # the schemas of the environment's tools
    template: str | None  # the model's chat template, which lists them
    at_once: int  # so many environments live at the same time, at most
    wants_copy: bool

    def __post_init__(self) -> None:
        self.names = [tool["function"]["name"] for tool in self.tools]
        self.special = special_ids(self.tokenizer.added_tokens_encoder.get)

    def play(self, rows: Sequence[Row], sampling: Sampling) -> list[Sample]:
        """The sample of each row, in order, whose `episode` is set. Raises RewardError if a reset makes a prompt too
        long."""
        samples: dict[int, Sample] = {}
        session_in_turns = self.sampler.session(replace(sampling, in_turns=True))
        with Phase("episodes", "episode", len(rows), LINE_S) as phase, session_in_turns as session:
            for number, sample in Stage(self, session, sampling, rows).samples():
                samples[number] = sample
                phase.done += 1
        return [samples[number] for number in range(len(rows))]

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def read(self, ids: Sequence[int]) -> Call | None:
        """The call of a turn, with a fault if there is no such tool."""
        call = read_call(ids, self.special, lambda part: str(self.tokenizer.decode(list(part))))
        if call and not call.fault and call.name not in self.names:
            return replace(call, fault=f"there is no tool {call.name[:100]!r}, only {', '.join(self.names)}")
        return call

    def result_ids(self, author: str, text: str) -> list[int]:
        """The tokens of a result's message, whose content is cut to MAX_RESULT_LEN tokens."""
        before, behind = result_parts(author)
        content, most = self.encode(without_tokens(text)), self.settings.MAX_RESULT_LEN
        if len(content) > most:
            content = content[:most] + self.encode(CUT_RESULT.format(most, len(content)))
        return [*self.encode(before), *content, *self.encode(behind)]


def check_played(samples: Sequence[Sample], name: str) -> None:
    """Raises RewardError if every episode in the environment `name` failed: there is nothing to learn from. Warns of
    some that did."""
    episodes = [sample.episode for sample in samples if sample.episode]
    if episodes and all(episode.has_failed for episode in episodes):
        raise RewardError(f"ENVIRONMENT={name}: every episode of this step failed: {episodes[-1].fault}")
    warn_of_failures(episodes)


def warn_of_failures(episodes: Sequence[Episode]) -> None:
    """Warns of episodes whose environment failed: figures are means over the others."""
    if faults := [episode.fault for episode in episodes if episode.has_failed]:
        log.warning("ENVIRONMENT: %d of %d episodes failed, such as by %s", len(faults), len(episodes), faults[0])


class Stage:
    """The episodes of one `play`: those that wait for their environment, for the next batch, and for their sample."""

    def __init__(self, player: EpisodePlayer, session: Session, sampling: Sampling, rows: Sequence[Row]):
        self.player, self.session, self.rows = player, session, iter(enumerate(rows))
        self.most = sampling.max_tokens
        self.turn_most = player.settings.MAX_TURN_LEN or self.most
        self.acting: dict[Environment, Play] = {}
        self.ready: list[Play] = []
        self.submitted: dict[int, Play] = {}
        self.finished: list[tuple[int, Sample]] = []

    def samples(self) -> Iterator[tuple[int, Sample]]:
        """Plays all episodes, and yields each with its number when it has ended."""
        pool, session = self.player.pool, self.session
        self.begin_episodes()
        while self.acting or self.ready or self.submitted:
            # A batch waits for all environments; an engine's step for none, unless it has nothing else to do.
            block = not session.is_stepwise or not (self.ready or self.submitted)
            for environment, reply in pool.replies(self.acting, block) if self.acting else ():
                self.hear(self.acting.pop(environment), reply)
            # Before a batch: which environment answers last must not decide whether new episodes are in it.
            self.begin_episodes()
            if session.is_stepwise or not self.acting:
                for play in sorted(self.ready, key=lambda play: play.number):
                    limit = min(self.turn_most, self.most - len(play.ids))
                    self.submitted[session.submit([*play.prompt_ids, *play.ids], limit)] = play
                self.ready.clear()
                for number, sample in session.advance():
                    self.take_turn(self.submitted.pop(number), sample)
            yield from self.finished
            self.finished.clear()

    def begin_episodes(self) -> None:
        """Begins the episodes of the next rows, as many as may live beside the others."""
        while len(self.acting) + len(self.ready) + len(self.submitted) < self.player.at_once:
            if (following := next(self.rows, None)) is None:
                return
            self.ask(Play(*following, self.player.pool.take()), "reset", following[1].reset_arguments)

    def ask(self, play: Play, method: str, *arguments: object) -> None:
        """Asks the episode's environment; `hear` gets its answer."""
        play.request, play.asked_at = method, time.monotonic()
        self.acting[play.environment] = play
        play.environment.ask(self.player.pool.timeout, method, *arguments)

    def hear(self, play: Play, reply: Reply) -> None:
        """What an environment's answer means for its episode."""
        play.tool_s += time.monotonic() - play.asked_at
        if reply.failed:
            self.lose(play, reply.failed)
        elif play.request == "reset":
            play.has_step_rewards = reply.reward is not None
            self.begin(play, reply.text)
            self.ready.append(play)
        elif play.request == "call":
            play.counts["errors"] += reply.is_error
            play.rewards[-1] = reply.reward or 0.0
            self.go_on(play, reply.text, reply.done)
        else:
            self.player.pool.give_back(play.environment)
            self.close(play, play.record(reply.reward, copy=reply.copy))

    def begin(self, play: Play, observation: str) -> None:
        """Sets the prompt. Raises RewardError if it is too long."""
        player = self.player
        text = without_tokens(observation)
        play.prompt = episode_prompt(player.settings, play.row, player.template, player.tools, text)
        play.prompt_ids = player.tokenizer(play.prompt)["input_ids"]
        if len(play.prompt_ids) > player.settings.MAX_PROMPT_LEN:
            fault = RESET_TOO_LONG.format(len(play.prompt_ids), player.settings.MAX_PROMPT_LEN)
            where = f"ENVIRONMENT={player.settings.ENVIRONMENT}: {play.row.file}, row {play.row.number}"
            raise RewardError(f"{where}: {fault}")

    def take_turn(self, play: Play, sample: Sample) -> None:
        """Adds a turn, and runs its call or ends the episode."""
        play.turns.append(len(play.ids))
        play.rewards.append(0.0)
        play.extend(sample.ids, sample.logps, 1)
        if not self.player.ends.has_ended(sample):
            return self.finish(play, "length" if len(play.ids) >= self.most else "turn_len")
        call = self.player.read(sample.ids)
        if call is None:
            return self.finish(play, "answer")
        play.counts["calls"] += 1
        play.author = call.author
        if call.fault:
            play.counts["unread"] += 1
            return self.go_on(play, error_text(call.fault), False)
        return self.ask(play, "call", call.name, call.arguments)

    def go_on(self, play: Play, text: str, done: bool) -> None:
        """Adds a result and lets the model write on, or ends the episode. Its last call is the end of its tokens: a
        result that nobody reads is not in them."""
        if done:
            return self.finish(play, "done")
        if len(play.turns) >= self.player.settings.MAX_TURNS:
            return self.finish(play, "turns")
        result = self.player.result_ids(play.author, text)
        if len(play.ids) + len(result) >= self.most:
            return self.finish(play, "length")
        play.extend(result, None, 0)
        return self.ready.append(play)

    def finish(self, play: Play, end: str) -> None:
        play.end = end
        self.ask(play, "finish", self.player.wants_copy)

    def lose(self, play: Play, fault: str) -> None:
        """Ends an episode whose environment failed; one that could not be reset is tried a second time, in another
        process."""
        if play.request == "reset":
            play.resets += 1
            if play.resets < 2:
                play.environment = self.player.pool.take()
                return self.ask(play, "reset", play.row.reset_arguments)
            self.begin(play, "")
            play.extend([self.player.ends.padding], None, 0)  # A row of no token at all cannot be packed.
        play.end = "reset" if play.request == "reset" else "timeout" if fault == TIMED_OUT else "failed"
        return self.close(play, play.record(fault=f"{play.request}: {fault}"))

    def close(self, play: Play, episode: Episode) -> None:
        self.finished.append((play.number, Sample(play.ids, play.logps, episode=episode)))
