# SPDX-License-Identifier: Apache-2.0
"""A reward function that changes nothing. Where its module is imported, transformers' rollouts are made up from the prompt,
a completion's place in its group and the step: the same ones for any number of processes."""

from __future__ import annotations

import collections
import zlib

from trl import GRPOTrainer

ANSWER = "<|channel|>analysis<|message|>{}<|end|><|start|>assistant<|channel|>final<|message|>[{}]<|return|>"


def generate(self, prompt_ids, *arguments):
    places, texts = collections.Counter(), []
    for ids in map(tuple, prompt_ids):
        places[ids] += 1
        number = zlib.crc32(str((ids, places[ids], self.state.global_step, self.run.stream)).encode())
        texts.append(ANSWER.format("so " * (number % 7), number % 5))
    return self._tokenizer(texts, add_special_tokens=False)["input_ids"], None


GRPOTrainer._generate_single_turn = generate


def nothing(completions, **columns):
    return [None] * len(completions)
