# SPDX-License-Identifier: Apache-2.0
"""The windows on which the demo is judged stay those that were fixed before its settings were chosen."""

import hashlib

import numpy as np
import pytest

from grpo.measure.demo_windows import COUNTS, MOST_FACTOR, REPORTED, SEED, STREAMS, profile_text
from grpo.tasks.tes.dataset import synthetic_windows
from grpo.tasks.tes.profiles import HELDOUT_START, read_profile, windows

HASHES = {
    "selection": "0eb6ff7d9f92c1122fc269d1f855015d7720ae3e4916dc3d7a38d28f8688a88b",
    "shown": "684a5459a174c1a958473574e942a53e1be55106bca67f1c6f91bc9fb8eee7ca",
    "others": "cd2820f3674e66f88931063f534e2a3dab3f9de82182315e366f6f714b96c9be",
    "varied": "5fd0498e600ae87d65d961c2c4f00ec6798b98030f2e71d5f088817875ff7c62",
}


@pytest.mark.parametrize("name", ("selection", *REPORTED))
def test_the_profiles_are_the_ones_that_were_committed_before_tuning(name):
    assert hashlib.sha256(profile_text(name).encode()).hexdigest() == HASHES[name]


def test_no_day_is_in_two_sets_or_among_the_demos_rows(tmp_path):
    days = {}
    for name in ("selection", *REPORTED):
        path = tmp_path / f"{name}.csv"
        path.write_text(profile_text(name), encoding="utf-8")
        days[name] = [day.tobytes() for window in windows(read_profile(path)) for day in window.co2]
        assert len(days[name]) == 4 * COUNTS.get(name, 5)
    days["train"] = [day.tobytes() for window, _ in synthetic_windows(SEED, 0, 20, HELDOUT_START) for day in window.co2]
    together = [day for name in days for day in days[name]]
    assert len(set(together)) == len(together)


def test_varied_loads_are_those_of_their_days_times_one_factor_from_half_to_double(tmp_path):
    path = tmp_path / "varied.csv"
    path.write_text(profile_text("varied"), encoding="utf-8")
    plain = [window for window, _ in synthetic_windows(SEED, STREAMS["varied"], COUNTS["varied"], HELDOUT_START)]
    factors = np.array(
        [changed.load_kw / window.load_kw for changed, window in zip(windows(read_profile(path)), plain, strict=True)]
    )
    assert factors.std(axis=-1).max() < 0.02  # loads are rounded to 0.1 kW
    means = factors.mean(axis=-1)
    assert 1 / MOST_FACTOR - 0.01 < means.min() < 0.6 and 1.7 < means.max() < MOST_FACTOR + 0.01
