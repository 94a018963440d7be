# SPDX-License-Identifier: Apache-2.0
"""A model that follows a script, in the tiny model's tokens."""

import contextlib

from grpo.harmony import ASSISTANT
from grpo.model.load import load_tokenizer
from grpo.plan.hub import TINY_PATH
from grpo.rollout.sampler import BatchSession, Sample, Sampler

TOKENIZER = load_tokenizer(str(TINY_PATH))
STOPS = [TOKENIZER.get_vocab()[f"<|{name}|>"] for name in ("return", "call", "endoftext")]
FINAL = "<|channel|>final<|message|>Done.<|return|>"


def call(text, tool="add"):
    return f"<|channel|>commentary to=functions.{tool} <|constrain|>json<|message|>{text}<|call|>"


def add(number):
    return call(f'{{"number": {number}}}')


class Script(Sampler):
    """A model that writes the next turn of its script. The script of an episode is found by the text of its prompt, and
    the turn by the results. It answers batches, or one prompt a step, the latest first."""

    has_logps = True

    def __init__(self, scripts, stepwise):
        self.scripts, self.stepwise, self.batches = scripts, stepwise, []

    @contextlib.contextmanager
    def session(self, sampling):
        assert sampling.in_turns
        yield (Steps if self.stepwise else BatchSession)(self.answer)

    def answer(self, prompts, limits):
        self.batches.append(len(prompts))
        for prompt, limit in zip(prompts, limits, strict=True):
            ids = self.turn(TOKENIZER.decode(prompt))[:limit]
            yield Sample(ids, [-len(ids) - n / 100 for n in range(len(ids))] if self.has_logps else None)

    def turn(self, text):
        """The tokens of the turn behind a prompt."""
        script = next(script for key, script in self.scripts.items() if key in text)
        return TOKENIZER(script[text.count(" to=assistant")])["input_ids"]


class GroupScript(Script):
    """For each prompt several scripts, which its completions take in turn; their first turns differ."""

    has_logps = False

    def __init__(self, scripts):
        super().__init__(scripts, stepwise=False)
        self.following = {key: iter(group) for key, group in scripts.items()}

    def turn(self, text):
        key = next(key for key in self.scripts if key in text)
        count, written = text.count(" to=assistant"), text.partition(ASSISTANT)[2]
        if not count:
            return TOKENIZER(next(self.following[key])[0])["input_ids"]
        return TOKENIZER(next(s for s in self.scripts[key] if written.startswith(s[0]))[count])["input_ids"]


class Steps(BatchSession):
    is_stepwise = True

    def advance(self):
        if not self.waiting:
            return []
        number, prompt, limit = self.waiting.pop()
        return [(number, next(iter(self.answer([prompt], [limit]))))]
