# SPDX-License-Identifier: Apache-2.0
"""`bench.py turns`: every episode gets all its turns, behind what it wrote before."""

import statistics

import pytest

from grpo.rollout.sampler import BatchSession, Sample, Session
from scripts.dev.turns import EPISODES, TURNS, play_turns, turn_lengths


def test_every_episode_plays_all_its_turns():
    seen = []

    def answer(prompts, limits):
        seen.extend(map(list, prompts))
        return (Sample([len(prompt)] * limit) for prompt, limit in zip(prompts, limits, strict=True))

    assert play_turns(BatchSession(answer), [[1], [2]], [[2, 2, 2], [2, 1]], [0]) == 9
    assert seen[:4] == [[1], [2], [1, 1, 1, 0], [2, 1, 1, 0]] and seen[4:] == [[1, 1, 1, 0, 4, 4, 0]]


def test_in_lockstep_no_turn_begins_before_all_have_ended():
    begun = {}

    class OneByOne(Session):
        def advance(self):
            number, prompt, limit = self.waiting.pop(0)
            begun[number] = len(self.waiting)
            return [(number, Sample([7] * limit))]

    for lockstep, waiting in ((False, [1, 1, 1, 1, 1, 0]), (True, [1, 0, 1, 0, 1, 0])):
        begun.clear()
        assert play_turns(OneByOne(), [[1], [2]], [[1, 1, 1], [2, 2, 2]], lockstep=lockstep) == 9
        assert [begun[number] for number in range(6)] == waiting


@pytest.mark.parametrize(("tokens", "least", "most"), [(64, 32, 96), (21, 11, 31), (1, 1, 1)])
def test_uneven_turns_have_the_mean_of_equal_ones(tokens, least, most):
    lengths = turn_lengths(tokens, True, 1)
    assert len(lengths) == EPISODES and {len(own) for own in lengths} == {TURNS}
    mean = statistics.fmean(length for own in lengths for length in own)
    assert {*range(least, most + 1)} == {length for own in lengths for length in own} and abs(mean / tokens - 1) < 0.03
    assert turn_lengths(tokens, False, 1) == [[tokens] * TURNS] * EPISODES
