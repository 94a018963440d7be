# SPDX-License-Identifier: Apache-2.0
"""verl's queue of rollouts, except that a failed one ends the run: verl 0.9.1 logs the error and trains on padding."""

from typing import Any

from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

POLL_S = 0.1  # verl looks every 2 s whether a step's rollouts have ended, longer than those of a small model take.


class StrictReplayBuffer(ReplayBuffer):
    """Raises RuntimeError as soon as a prompt's rollout or reward has failed."""

    def __init__(self, **options: Any):
        super().__init__(**options, poll_interval=POLL_S)

    def _sync_metadata_from_transfer_queue(self) -> None:
        super()._sync_metadata_from_transfer_queue()
        if failed := sum(map(len, self.failure_keys.values())):
            raise RuntimeError(f"{failed} prompt(s) have no completion or no reward: the errors above say why")
