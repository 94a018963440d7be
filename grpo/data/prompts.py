# SPDX-License-Identifier: Apache-2.0
"""Rows to rendered prompts, and the order in which a run asks them."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import json
import random
import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from grpo.data.files import Row
from grpo.phases import with_progress
from grpo.settings import Problems, Settings, described

ANSWER_BEFORE, ANSWER_AFTER = "<|channel|>final<|message|>[", "]<|return|>"


def answer_of(row: Row) -> str | None:
    """The completion that a row asks for, behind what its prompt has opened of it: the `answer` column (the text of the
    final channel, or from `<|channel|>` on all that the assistant writes), else its best action; None where all are alike.

    Raises ValueError where the prompt opens another channel than the answer.
    """
    answer, worth = row.columns.get("answer"), row.q or row.rewards
    text = "" if answer is None else str(answer).strip()
    if not text and len(set(worth)) < 2:
        return None
    if not text.startswith("<|channel|>"):
        text = ANSWER_BEFORE[:-1] + (text or f"[{worth.index(max(worth))}]")
    role, prompt = row.messages[0]
    opened = prompt.rpartition("<|start|>assistant")[2] if role == "rendered" else ""
    if not text.startswith(opened):
        raise ValueError(f"the prompt opens {opened!r}, and the answer begins with {text[: len(opened)]!r}")
    return text.removeprefix(opened).removesuffix(ANSWER_AFTER[1:]) + ANSWER_AFTER[1:]


def render(template: str, messages: Sequence[tuple[str, str]], effort: str, date: str) -> str:
    """A conversation rendered by a Hugging Face chat template, up to where the assistant begins.

    As transformers' own renderer does it (a test compares the two), which would cost an import of torch. gpt-oss's
    template writes today's date; here it gets `date`, so that a prompt never changes."""
    given = {"messages": [{"role": role, "content": text} for role, text in messages], "reasoning_effort": effort}
    return compiled(template, date).render(**given, add_generation_prompt=True)


@functools.cache
def compiled(template: str, date: str) -> Any:
    """A chat template that writes `date`: compiling takes as long as rendering a hundred prompts."""
    # Imported late, so that the preflight can name packages that are missing.
    from jinja2 import TemplateError
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
    environment.globals["raise_exception"] = raise_exception
    moment = time.strptime(date, "%Y-%m-%d")
    environment.globals["strftime_now"] = lambda form: time.strftime(form, moment)
    made = environment.from_string(template)
    made.globals = dict(made.globals)  # as a ChainMap, copying them is a fifth of rendering a row
    return made


def render_rows(
    settings: Settings, rows: Sequence[Row], template: str | None, tokenizer: Path, problems: Problems
) -> tuple[list[Row], int]:
    """The rows with their prompts rendered, and the longest prompt in tokens; prompts over MAX_PROMPT_LEN are problems, and
    so are a template or a tokenizer that fail (then the rows come back as they were, with 0)."""
    where, rendered = f"MODEL_ID={settings.MODEL_ID}", []
    for row in with_progress("rendering prompts", rows, total=len(rows)):
        if row.messages[0][0] == "rendered":
            prompt = row.messages[0][1]
        elif template is None:
            what = f"it has no chat template, and {row.file} holds prompts that are not rendered"
            problems.add(where, what, "Add chat_template.jinja to the model, or give rendered prompts")
            return list(rows), 0
        else:
            try:
                prompt = render(template, row.messages, settings.REASONING_EFFORT, settings.PROMPT_DATE)
            except Exception as error:  # whatever a template raises, damaged or not
                what = f"its chat template fails on {row.file}, row {row.number} ({described(error)})"
                problems.add(where, what, "Download the model again, or write what its template takes")
                return list(rows), 0
        rendered.append(dataclasses.replace(row, prompt=prompt))
    try:
        tokens = count_tokens(tokenizer, list(dict.fromkeys(row.prompt for row in rendered)))
        lengths = [tokens[row.prompt] for row in rendered]
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a panic of its Rust code is no Exception
        problems.add(where, f"its tokenizer.json fails ({described(error)})", "Download the model again")
        return list(rows), 0
    long = [(row, n) for row, n in zip(rendered, lengths, strict=True) if n > settings.MAX_PROMPT_LEN]
    if long:
        longest, tokens_of_it = max(long, key=lambda pair: pair[1])
        what = f"the prompt has {tokens_of_it} tokens, MAX_PROMPT_LEN is {settings.MAX_PROMPT_LEN}"
        if len(long) > 1:
            what += f"; {len(long)} of {len(rows)} prompts are longer than that, and this is the longest"
        fix = f"Shorten what is too long, or set MAX_PROMPT_LEN={tokens_of_it}"
        problems.add(f"{longest.file}, row {longest.number}", what, fix)
    return rendered, max(lengths, default=0)


AT_ONCE = 1000  # prompts: what the tokenizer returns of one takes more memory than the row


def count_tokens(tokenizer: Path, prompts: Sequence[str]) -> dict[str, int]:
    """Tokens of each prompt. Raises what the tokenizers package raises for a file that it cannot use, which may be no
    Exception.

    No token reaches across a special one, so what stands between two of them is counted once for all prompts that share it,
    such as the system message. Where a tokenizer knows better (it adds tokens of its own), the first of AT_ONCE prompts
    tells, and all are counted whole."""
    from tokenizers import Tokenizer  # late, as above

    loaded, lengths, known = Tokenizer.from_file(str(tokenizer)), {}, {}
    special = sorted((token.content for token in loaded.get_added_tokens_decoder().values()), key=len, reverse=True)
    border = re.compile("|".join(map(re.escape, special)) or "(?!)")

    def count(texts: Sequence[str]) -> list[int]:
        return [len(one) for one in loaded.encode_batch_fast(texts)]

    starts = range(0, len(prompts), AT_ONCE)
    for start in with_progress("counting tokens", starts, total=len(prompts), each=AT_ONCE):
        some = prompts[start : start + AT_ONCE]
        parts = [border.split(prompt) for prompt in some]
        times = Counter(itertools.chain.from_iterable(parts))
        new = [part for part in times if part not in known]
        found = known | dict(zip(new, count(new), strict=True))
        known |= {part: found[part] for part in new if times[part] > 1}
        tokens = [len(part) - 1 + sum(map(found.__getitem__, part)) for part in parts]
        lengths |= zip(some, tokens if count(some[:1]) == tokens[:1] else count(some), strict=True)
    return lengths


def prompt_order(rows: int, seed: int, count: int) -> Iterator[int]:
    """The first `count` row indices of an endless stream that shuffles `rows` rows again and again.

    A function of `seed` alone: a resumed run continues the stream where it was, also in a later epoch, which a sampler
    that shuffles once per epoch cannot (https://github.com/huggingface/trl/issues/7040). No row is ever left over."""
    for done in range(0, count, rows):
        order = list(range(rows))
        random.Random(f"{seed}/{done // rows}").shuffle(order)
        yield from order[: count - done]


def sampling_seed(seed: int, step: int, stream: str) -> int:
    """Seed of one generation: a function of SEED and the step, so that a resumed run samples what it would have."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{stream}/{step}".encode()).digest()[:8], "big") >> 1


@dataclasses.dataclass(frozen=True)
class StepRows:
    """Row indices for TRL's dataloader: the first `count` prompts of the stream, each `generations` times in a row. Made as
    they are asked for: a list of TOTAL_STEPS=10**9 steps has no room in any memory."""

    rows: int
    seed: int
    count: int
    generations: int

    def __len__(self) -> int:
        return self.count * self.generations

    def __iter__(self) -> Iterator[int]:
        for row in prompt_order(self.rows, self.seed, self.count):
            yield from itertools.repeat(row, self.generations)
