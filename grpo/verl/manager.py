# SPDX-License-Identifier: Apache-2.0
"""verl's reward manager with what train_grpo.py's reward functions see: special tokens, and whether a completion ended.

Loaded by verl's workers alone, by the options of grpo/verl/commands.py: verl's own managers strip special tokens, and
tell a function neither the tokens nor the end.
"""

from __future__ import annotations

import functools
from typing import Any

from verl.experimental.reward_loop.reward_manager.base import RewardManagerBase

from grpo.verl.score import has_channels


class RewardManager(RewardManagerBase):
    """Calls grpo/verl/score.py's compute_score for one completion at a time."""

    def __init__(self, config: Any, tokenizer: Any, compute_score: Any, **_: Any):
        super().__init__(config, tokenizer, compute_score)
        # vLLM knows more stops, those of generation_config.json: a shorter completion has ended whatever its last token is.
        self.stops = {tokenizer.eos_token_id, tokenizer.pad_token_id}
        self.longest = config.data.max_response_length
        self.plain = not has_channels(tokenizer.chat_template or "")  # else special tokens tell answer from reasoning

    async def run_single(self, data: Any) -> dict[str, Any]:
        """`data`: a DataProto whose last item is the completion. Returns reward_score and reward_extra_info."""
        item = data[-1]
        ids = item.batch["responses"]
        ids = ids[: int(item.batch["attention_mask"][-len(ids) :].sum())].tolist()
        known = dict(item.non_tensor_batch["extra_info"])
        known |= {
            "truncated": not ids or (len(ids) >= self.longest and ids[-1] not in self.stops),
            "completion_ids": ids,
        }
        call = functools.partial(
            self.compute_score,
            data_source=item.non_tensor_batch["data_source"],
            solution_str=self.tokenizer.decode(ids, skip_special_tokens=self.plain),
            ground_truth=item.non_tensor_batch["reward_model"]["ground_truth"],
            extra_info=known,
        )
        result = await self.loop.run_in_executor(None, call)
        return {"reward_score": result["score"], "reward_extra_info": result}
