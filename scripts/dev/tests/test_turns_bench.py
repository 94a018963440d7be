# SPDX-License-Identifier: Apache-2.0
"""`bench.py turns`: every episode gets all its turns, behind what it wrote before."""

from grpo.rollout.sampler import Sample, Session
from scripts.dev.turns import play_turns


def test_every_episode_plays_all_its_turns():
    seen = []

    def answer(prompts, limits):
        seen.extend(map(list, prompts))
        return (Sample([len(prompt)] * limit) for prompt, limit in zip(prompts, limits, strict=True))

    assert play_turns(Session(answer), [[1], [2]], 3, 2, [0]) == 12
    assert seen[:4] == [[1], [2], [1, 1, 1, 0], [2, 1, 1, 0]] and seen[4] == [1, 1, 1, 0, 4, 4, 0] and len(seen) == 6
