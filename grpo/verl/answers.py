# SPDX-License-Identifier: Apache-2.0
"""The rows' answers for verl's SFT: the tokens that a rollout would see and write, whatever the chat template.

verl's own data set renders each message by itself, which templates such as Harmony's do not support.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from pyarrow import parquet

from grpo.harmony import final_channel
from grpo.verl.score import has_channels


def prompt_and_answer(
    tokenizer: Any, messages: Sequence[Mapping[str, str]], answer: str, options: Mapping[str, Any]
) -> tuple[str, str]:
    """(A rendered prompt, the text that the model is to write behind it). Raises ValueError without such a text."""
    prompt = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True, **options)
    if has_channels(tokenizer):  # `answer` already has the form that the model writes.
        return prompt, answer
    conversation = [*messages, {"role": "assistant", "content": final_channel(answer)}]
    text = tokenizer.apply_chat_template(conversation, tokenize=False, **options)
    if not text.startswith(prompt):
        raise ValueError("the chat template does not write an answer right after the prompt. Use another template")
    return prompt, text.removeprefix(prompt)


class Answers(list[dict[str, torch.Tensor]]):
    """The rows with an answer: `input_ids`, `position_ids` and `loss_mask` (L,), 1 on the answer's tokens."""

    def __init__(self, parquet_files: str, tokenizer: Any, config: Mapping[str, Any], max_samples: int = -1, **_: Any):
        rows = [row for row in parquet.read_table(parquet_files).to_pylist() if row["answer"]]
        rows = rows[:max_samples] if max_samples > 0 else rows  # data.train_max_samples
        if len(rows) < config["train_batch_size"]:
            size = f"data.train_batch_size is {config['train_batch_size']}"
            raise ValueError(f"only {len(rows)} rows have an `answer` or a best action, and {size}")
        for row in rows:
            texts = prompt_and_answer(tokenizer, row["prompt"], row["answer"], config["apply_chat_template_kwargs"])
            prompt, answer = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts)
            if len(prompt) + len(answer) > config["max_length"]:
                where = f"{row['data_source']}, row {row['extra_info']['index'] + 1}"
                lengths = f"prompt and answer have {len(prompt)} and {len(answer)} tokens"
                raise ValueError(f"{where}: {lengths}. Raise data.max_length, which is {config['max_length']}")
            ids, mask = torch.tensor(prompt + answer), torch.tensor([0] * len(prompt) + [1] * len(answer))
            self.append({"input_ids": ids, "position_ids": torch.arange(len(ids)), "loss_mask": mask})
