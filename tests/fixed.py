# SPDX-License-Identifier: Apache-2.0
"""A reward function that changes nothing. In a run that imports its module, transformers' rollouts are made up from the
prompt, a completion's place in its group and the step: the same ones for any number of processes."""

from __future__ import annotations

import collections
import sys
import zlib

from grpo.learn.trainer import Trainer

ANSWER = "<|channel|>analysis<|message|>{}<|end|><|start|>assistant<|channel|>final<|message|>[{}]<|return|>"


def generate_own(self, prompt_ids, num_generations, own, temperature):
    places, texts = collections.Counter(), []
    for ids in map(tuple, prompt_ids[own.start : own.stop]):
        places[ids] += 1
        number = zlib.crc32(str((ids, places[ids], self.state.global_step, temperature)).encode())
        texts.append(ANSWER.format("so " * (number % 7), number % 5))
    return self._tokenizer(texts, add_special_tokens=False)["input_ids"]


# pytest looks for doctests in every module and imports this one too: its own process keeps the real method.
if "pytest" not in sys.modules:
    Trainer.generate_own = generate_own


def nothing(completions, **columns):
    return [None] * len(completions)
