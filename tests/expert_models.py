# SPDX-License-Identifier: Apache-2.0
"""The tiny model with its experts packed or not."""

from __future__ import annotations

import json

from grpo.model.load import load_model


def config_of(tiny):
    return json.loads((tiny / "config.json").read_text(encoding="utf-8"))


def load(tiny, experts):
    return load_model(str(tiny), config_of(tiny), "eager", experts)
