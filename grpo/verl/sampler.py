# SPDX-License-Identifier: Apache-2.0
"""verl's queue of rollouts, ending the run where one failed: verl 0.9.1 itself logs the error and trains on padding."""

from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer


class Strict(ReplayBuffer):
    """Raises RuntimeError as soon as a prompt's rollout or reward has failed."""

    def _sync_metadata_from_transfer_queue(self) -> None:
        super()._sync_metadata_from_transfer_queue()
        if failed := sum(map(len, self.failure_keys.values())):
            raise RuntimeError(f"{failed} prompt(s) have no completion or no reward: the errors above say why")
