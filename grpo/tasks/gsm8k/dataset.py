# SPDX-License-Identifier: Apache-2.0
"""Invented problems in the format of GSM8K (Cobbe et al. 2021, 2110.14168): `question`, and `answer` that ends in
#### N."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

ROWS = {"train": 200, "heldout": 50}
NAMES = ("Aiko", "Ben", "Carla", "Deniz", "Emeka", "Farida", "Goro", "Hana")
THINGS = ("apples", "pencils", "stamps", "marbles", "cookies", "tickets")
# Question, and its solution; `=` steps are written as GSM8K's annotations <<a*b=c>>.
STORIES = (
    ("{name} buys {a} boxes of {b} {things} and gives {c} of them away. How many {things} are left?",
     "{name} buys {a} * {b} = <<{a}*{b}={ab}>>{ab} {things}. {ab} - {c} = <<{ab}-{c}={left}>>{left} are left."),
    ("{name} has {c} {things} and gets {b} more on each of {a} days. How many {things} does {name} have then?",
     "{name} gets {a} * {b} = <<{a}*{b}={ab}>>{ab} {things}. {ab} + {c} = <<{ab}+{c}={more}>>{more} in all."),
    ("{a} friends have {b} {things} each. They put them together and share them equally with {name}'s {d} friends, all "
     "{e} of them. How many {things} does each get?",
     "Together they have {a} * {b} = <<{a}*{b}={ab}>>{ab} {things}. Each gets {ab} / {e} = <<{ab}/{e}={each}>>{each}."),
)  # fmt: skip


def problems(seed: int, split: str) -> Iterator[dict[str, str]]:
    """The rows of a split; no question is in both."""
    seen: set[str] = set()
    for name, count in ROWS.items():
        draw, before = random.Random(f"{seed}/{name}"), len(seen)
        while len(seen) < before + count:
            story, row = draw.randrange(len(STORIES)), draw_row(draw)
            question, answer = (text.format(**row) for text in STORIES[story])
            if question in seen or story == 2 and row["rest"]:
                continue
            seen.add(question)
            if name == split:
                yield {"question": question, "answer": f"{answer}\n#### {row[('left', 'more', 'each')[story]]}"}


def draw_row(draw: random.Random) -> dict[str, str | int]:
    """Names and numbers of a story."""
    a, b = draw.randint(2, 12), draw.randint(2, 25)
    c, d = draw.randint(1, a * b - 1), draw.randint(1, 6)
    name, things = draw.choice(NAMES), draw.choice(THINGS)
    numbers = {"a": a, "b": b, "c": c, "d": d, "e": a + d, "ab": a * b}
    results = {"left": a * b - c, "more": a * b + c, "each": a * b // (a + d), "rest": a * b % (a + d)}
    return numbers | results | {"name": name, "things": things}


def files(seed: int) -> dict[str, str]:
    """The committed JSON lines, name -> text."""
    return {f"gsm8k_{split}.jsonl": "".join(json.dumps(row) + "\n" for row in problems(seed, split)) for split in ROWS}
