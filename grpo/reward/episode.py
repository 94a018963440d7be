# SPDX-License-Identifier: Apache-2.0
"""How an episode went: what the learner, the reward functions and the logs need of it, as values that JSON can hold."""

from __future__ import annotations

import base64
import pickle
import types
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

# Why episodes end; others than these end with an `answer` without a call, or because the environment is `done`.
CUT = {"turns": "MAX_TURNS", "turn_len": "MAX_TURN_LEN", "length": "MAX_COMPLETION_LEN"}  # This limit ended them.
FAILED = ("timeout", "failed", "reset")  # The environment hung, failed, or could not be reset: no reward arrived.


@dataclass(frozen=True)
class Episode:
    """An episode whose C tokens are T turns of the model and, between them, results of tools."""

    prompt: str  # with the text of the reset
    prompt_ids: Sequence[int]
    learned: Sequence[int]  # (C,): 1 for a token that the model wrote, 0 for one of a result
    turns: Sequence[int]  # (T,): the index of each turn's first token
    turn_rewards: Sequence[float] | None  # (T,): what `step_rewards` got by each turn's call; None without it
    reward: float | None  # what `get_reward` returned; None without it, and where it never arrived
    end: str  # why it ended: in CUT or FAILED, `answer` or `done`
    fault: str = ""  # of the environment, if it failed
    calls: int = 0
    unread: int = 0  # calls that could not be read, or named no tool
    errors: int = 0  # calls of a tool that raised
    tool_s: float = 0.0  # time that the environment took
    copy: str = ""  # the environment as a pickle in base64, where reward functions want it

    @property
    def is_cut(self) -> bool:
        return self.end in CUT

    @property
    def has_failed(self) -> bool:
        return self.end in FAILED

    @property
    def tokens(self) -> int:
        """The tokens that the model wrote."""
        return sum(self.learned)

    @property
    def read_share(self) -> float:
        """The share of turns that end in a call that could be read, or in an answer."""
        unread = self.unread + (self.end in ("turn_len", "length") and self.calls < len(self.turns))
        return 1 - unread / max(1, len(self.turns))

    def total(self) -> float | None:
        """What the environment gave: `get_reward` and `step_rewards` together, None without either and where it
        failed."""
        if self.has_failed or self.reward is None and self.turn_rewards is None:
            return None
        return (self.reward or 0.0) + sum(self.turn_rewards or ())

    def environment(self) -> Any:
        """A copy of the environment as it stood at the end, for reward functions; its attributes alone where it cannot
        be copied whole, and None where it failed."""
        if not self.copy:
            return None
        value = pickle.loads(base64.b64decode(self.copy))
        return types.SimpleNamespace(**value) if type(value) is dict else value
