# SPDX-License-Identifier: Apache-2.0
"""A reward function without rewards, whose module replaces transformers' rollouts.

The completions depend on the prompt, their position in the group and the step, so they are the same for any number of
processes.
"""

import collections
import sys
import zlib

from grpo.rollout.sampler import RankedSampler, Sample

ANSWER = "<|channel|>analysis<|message|>{}<|end|><|start|>assistant<|channel|>final<|message|>[{}]<|return|>"


def sample(self, prompts, group, sampling):
    positions, texts = collections.Counter(), []
    for ids in map(tuple, prompts):
        positions[ids] += 1
        number = zlib.crc32(str((ids, positions[ids], sampling.seed, sampling.temperature)).encode())
        texts.append(ANSWER.format("so " * (number % 7), number % 5))
    return [Sample(ids) for ids in self.sampler.tokenizer(texts, add_special_tokens=False)["input_ids"]]


# pytest, which imports every module to look for doctests, keeps the real method.
if "pytest" not in sys.modules:
    RankedSampler.sample = sample


def nothing(completions, **columns):
    return [None] * len(completions)
