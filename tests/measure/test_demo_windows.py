# SPDX-License-Identifier: Apache-2.0
"""The windows on which the demo is judged stay those that were fixed before its settings were chosen."""

import hashlib

from grpo.measure.demo_windows import profile_text

HASHES = {
    "selection": "0eb6ff7d9f92c1122fc269d1f855015d7720ae3e4916dc3d7a38d28f8688a88b",
    "shown": "684a5459a174c1a958473574e942a53e1be55106bca67f1c6f91bc9fb8eee7ca",
    "others": "cd2820f3674e66f88931063f534e2a3dab3f9de82182315e366f6f714b96c9be",
    "varied": "5fd0498e600ae87d65d961c2c4f00ec6798b98030f2e71d5f088817875ff7c62",
}


def test_the_profiles_are_the_ones_that_were_committed_before_tuning():
    assert {name: hashlib.sha256(profile_text(name).encode()).hexdigest() for name in HASHES} == HASHES
