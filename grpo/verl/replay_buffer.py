# SPDX-License-Identifier: Apache-2.0
"""verl's queue of rollouts, except that a failed one ends the run: verl 0.9.1 logs the error and trains on padding."""

from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer


class StrictReplayBuffer(ReplayBuffer):
    """Raises RuntimeError as soon as a prompt's rollout or reward has failed."""

    def _sync_metadata_from_transfer_queue(self) -> None:
        super()._sync_metadata_from_transfer_queue()
        if failed := sum(map(len, self.failure_keys.values())):
            raise RuntimeError(f"{failed} prompt(s) have no completion or no reward: the errors above say why")
