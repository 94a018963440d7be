# SPDX-License-Identifier: Apache-2.0
"""Episodes whose turns rows show, as scripts/sft.py learns from them."""

import contextlib
from collections.abc import Iterator, Sequence

from grpo.common import InputError, log, one_line
from grpo.data.files import Row
from grpo.reward.episode import CUT
from grpo.rollout.episodes import EpisodePlayer
from grpo.rollout.sampler import BatchSession, Limits, Sample, Sampler, Sampling, Session, Tokens

Pairs = dict[str, list[list[int]]]


class NoTurnLeft(Exception):
    """An episode goes on behind the last turn that its row shows; the argument is its tokens."""


class Recital(Sampler):
    """Writes turns that it got, one after the other."""

    def __init__(self) -> None:
        self.turns: Iterator[list[int]] = iter(())

    @contextlib.contextmanager
    def session(self, sampling: Sampling) -> Iterator[Session]:
        yield BatchSession(self.answer)

    def answer(self, prompts: Sequence[Tokens], limits: Limits) -> Iterator[Sample]:
        for prompt in prompts:
            if (turn := next(self.turns, None)) is None:
                raise NoTurnLeft(prompt)
            yield Sample(turn)


def play_demonstrations(
    player: EpisodePlayer, rows: Sequence[Row], turns: Sequence[Sequence[str]], sampling: Sampling
) -> Pairs:
    """`input_ids` and `labels` of each row's episode, whose `turns` it shows; rows without turns are left out. Only
    what the model writes has labels; -100, which the loss leaves out, stands for prompt and results.

    `player` plays with a Recital. Raises InputError for an episode that does not go as its turns do."""
    recital = player.sampler
    assert isinstance(recital, Recital)
    pairs: Pairs = {"input_ids": [], "labels": []}
    for row, row_turns in zip(rows, turns, strict=True):
        if not row_turns:
            continue
        recital.turns = iter([player.encode(text) for text in row_turns])
        where = f"{row.file}, row {row.number}: the episode"
        try:
            (sample,) = player.play([row], sampling)
        except NoTurnLeft as error:
            result = str(player.tokenizer.decode(error.args[0])).rpartition("<|message|>")[2].partition("<|end|>")[0]
            fault = (
                f"{where} goes on behind its {len(row_turns)} turns, the last of which got `{one_line(result, 200)}`"
            )
            raise InputError(f"{fault}. Correct that call, add others, or a column `answer`") from None
        episode = sample.episode
        assert episode
        if episode.errors:
            log.warning("%s shows %d calls whose tool raised. The model learns them too", where, episode.errors)
        is_done_early = any(turn.endswith("<|call|>") for turn in row_turns[len(episode.turns) :])
        if episode.is_cut or episode.has_failed or episode.unread or is_done_early:
            fault = f" ({episode.fault})" if episode.fault else ""
            fix = f". Raise {CUT[episode.end]}, or show less" if episode.is_cut else ""
            raise InputError(
                f"{where} ended by `{episode.end}`{fault} in turn {len(episode.turns)} of {len(row_turns)}{fix}"
            )
        own = zip(sample.ids, episode.learned, strict=True)
        pairs["input_ids"].append([*episode.prompt_ids, *sample.ids])
        pairs["labels"].append([-100] * len(episode.prompt_ids) + [token if kind else -100 for token, kind in own])
    return pairs
