# SPDX-License-Identifier: Apache-2.0
"""A reward manager that passes on special tokens and whether a completion ended, as train_grpo.py does.

verl's own managers strip special tokens, and pass on neither ids nor a completion's end. Only its workers load this.
"""

import functools
from typing import Any

from verl.experimental.reward_loop.reward_manager.base import RewardManagerBase

from grpo.verl.score import has_channels


class RewardManager(RewardManagerBase):
    """Calls `compute_score` of grpo/verl/score.py for one completion at a time."""

    def __init__(self, config: Any, tokenizer: Any, compute_score: Any, **_: Any):
        super().__init__(config, tokenizer, compute_score)
        # vLLM also stops at the tokens of generation_config.json, so a completion below the limit has always ended.
        self.stops = {tokenizer.eos_token_id, tokenizer.pad_token_id}
        self.limit = config.data.max_response_length
        self.harmony = has_channels(tokenizer)

    async def run_single(self, data: Any) -> dict[str, Any]:
        """Scores the last item of `data`, a DataProto. Returns reward_score and reward_extra_info."""
        item = data[-1]
        ids = item.batch["responses"]
        ids = ids[: int(item.batch["attention_mask"][-len(ids) :].sum())].tolist()
        truncated = not ids or (len(ids) >= self.limit and ids[-1] not in self.stops)
        added = {"truncated": truncated, "completion_ids": ids, "harmony": self.harmony}
        # In Harmony, special tokens separate the answer from the reasoning.
        text = self.tokenizer.decode(ids, skip_special_tokens=not self.harmony)
        info = dict(item.non_tensor_batch["extra_info"]) | added
        call = functools.partial(self.compute_score, solution_str=text, extra_info=info)
        result = await self.loop.run_in_executor(None, call)
        return {"reward_score": result["score"], "reward_extra_info": result}
