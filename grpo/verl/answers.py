# SPDX-License-Identifier: Apache-2.0
"""verl's SFT on the rows' answers: the tokens that a rollout would see and write, whatever the chat template.

Loaded by verl's SFT trainer alone (`data.custom_cls`): its own data set renders each message by itself, which templates such
as Harmony's do not take.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from pyarrow import parquet


def prompt_and_answer(
    tokenizer: Any, messages: Sequence[Mapping[str, str]], answer: str, options: Mapping[str, Any]
) -> tuple[str, str]:
    """A rendered prompt, and what the model is to write behind it, to its last token. Raises ValueError where the chat
    template writes an answer elsewhere."""
    prompt = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True, **options)
    if answer.startswith("<|channel|>"):  # Harmony: whole already
        return prompt, answer
    talk = [*messages, {"role": "assistant", "content": answer}]
    text = tokenizer.apply_chat_template(talk, tokenize=False, **options)
    if not text.startswith(prompt):
        raise ValueError("the chat template writes an answer elsewhere than behind the prompt. Take another template")
    return prompt, text.removeprefix(prompt)


class Answers(torch.utils.data.Dataset):
    """Rows with an answer: `input_ids`, `position_ids` and `loss_mask` (L,), 1 on the answer's tokens."""

    def __init__(self, parquet_files: Any, tokenizer: Any, config: Mapping[str, Any], **_: Any):
        files = [parquet_files] if isinstance(parquet_files, str) else list(parquet_files)
        rows = [row for file in files for row in parquet.read_table(file).to_pylist() if row["answer"]]
        options, self.pairs = dict(config["apply_chat_template_kwargs"]), []
        for row in rows:
            texts = prompt_and_answer(tokenizer, row["prompt"], row["answer"], options)
            prompt, answer = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts)
            if len(prompt) + len(answer) > config["max_length"]:
                what = f"prompt and answer have {len(prompt)} and {len(answer)} tokens, together more than"
                raise ValueError(
                    f"{row['data_source']}, row {row['extra_info']['index'] + 1}: {what} {config['max_length']}. "
                    "Raise MAX_PROMPT_LEN or MAX_COMPLETION_LEN"
                )
            self.pairs.append((prompt, answer))

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        prompt, answer = self.pairs[index]
        return {
            "input_ids": torch.tensor(prompt + answer),
            "position_ids": torch.arange(len(prompt) + len(answer)),
            "loss_mask": torch.tensor([0] * len(prompt) + [1] * len(answer)),
        }
