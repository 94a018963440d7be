# SPDX-License-Identifier: Apache-2.0
"""Tasks in plain English, generated: word problems, tickets to route, sentences that an own function scores, and days
of the plant, whose hours are calls of a tool.

Each has rows to train on, held-out rows whose sentences and numbers or words differ, rows for the warm-up, whose
answers have the right form and a random content, and the training rows with a right answer, for comparison with SFT."""

import random
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo.harmony import answer_turn
from scripts.dev.language_days import draw_day
from scripts.dev.record import split_settings, write_lines

Row = dict[str, Any]
Shown = str | list[Row]  # a completion, or the calls of an episode
TEXTS: dict[str, Any] = tomllib.loads((Path(__file__).parent / "language.toml").read_text(encoding="utf-8"))
RELATED = (3, 2, 1, 0)  # A desk that can pass such a ticket on: it earns RELATED_REWARD.
RELATED_REWARD = 0.4


@dataclass(frozen=True)
class Task:
    """A task's rows and the settings of its runs."""

    # (random numbers, `train`, `heldout` or `warmup`) -> the row, a right completion, one for the warm-up.
    draw: Callable[[random.Random, str], tuple[Row, Shown, Shown]]
    settings: dict[str, str]


def completion(reason: str, answer: str) -> str:
    """An assistant's turn in Harmony: a reason in the analysis channel, then the answer in the final one."""
    return f"<|channel|>analysis<|message|>{reason}<|end|>{answer_turn(answer)}"


def half(part: str) -> str:
    """The half of language.toml's words that a part's rows are made of: the warm-up sees no held-out words."""
    return "heldout" if part == "heldout" else "train"


def calculate(a: int, operation: str, b: int) -> int:
    return {"+": a + b, "-": a - b, "*": a * b}[operation]


def solved(a: int, steps: list[tuple[str, int]]) -> str:
    """The completion that does the operations in turn."""
    lines, value = [], a
    for operation, b in steps:
        result = calculate(value, operation, b)
        lines.append(f"{value} {operation} {b} = {result}.")
        value = result
    return completion(" ".join(lines), f"#### {value}")


def draw_story(rng: random.Random, part: str) -> tuple[Row, str, str]:
    """A word problem of one or two steps. Numbers tell nothing about the operation. Pairs whose sum is a multiple of 5
    are held out. The warm-up computes right, with operations that have nothing to do with the sentences."""
    first, second = rng.choice("+-*"), rng.choice("+-")
    while True:
        a, b = rng.randint(3, 12), rng.randint(2, 9)
        if a > b + 1 and (part == "warmup" or ((a + b) % 5 == 0) == (part == "heldout")):
            break
    steps, two = [(first, b)], rng.random() < 0.5
    sentences = [rng.choice(TEXTS["stories"][first][half(part)])]
    c = rng.randint(2, 9)
    if two:
        c = min(c, calculate(a, first, b) - 1) if second == "-" else c
        steps.append((second, c))
        sentences.append(rng.choice(TEXTS["second"][second][half(part)]))
    thing = rng.choice(TEXTS["things"])
    question = " ".join([*sentences, f"How many {thing} are there?"])
    question = question.format(n=rng.choice(TEXTS["names"]), t=thing, a=a, b=b, c=c)
    other = rng.choice("+-*")
    wrong = [(other, b)]
    if two:
        smaller = calculate(a, other, b) > c
        wrong.append((rng.choice("+-") if smaller else "+", c))
    right = solved(a, steps)
    answer = right.rpartition("<|message|>")[2].removesuffix("<|return|>")
    return {"question": question, "answer": answer}, right, solved(a, wrong)


def draw_ticket(rng: random.Random, part: str) -> tuple[Row, str, str]:
    """A ticket, and what each desk earns for it. The warm-up names the ticket's subject and a random desk."""
    desk, chosen = rng.randrange(len(TEXTS["desks"])), rng.randrange(len(TEXTS["desks"]))
    noun = rng.choice(TEXTS["nouns"][TEXTS["desks"][desk]][half(part)])
    sentences = [rng.choice(TEXTS["frames"][half(part)]).format(x=noun), *rng.sample(TEXTS["chatter"], 2)]
    rng.shuffle(sentences)
    names = ", ".join(f"[{k}] {name}" for k, name in enumerate(TEXTS["desks"]))
    prompt = f'{rng.choice(TEXTS["names"])} writes: "{" ".join(sentences)}" Which desk takes it: {names}?'
    rewards = {desk: 1.0, RELATED[desk]: RELATED_REWARD}
    row = {"prompt": prompt} | {f"reward_action_{k}": rewards.get(k, 0.0) for k in range(len(TEXTS["desks"]))}

    def routed(k: int) -> str:
        return completion(f"It is about the {noun}. That is for {TEXTS['desks'][k]}.", f"[{k}]")

    return row, routed(desk), routed(chosen)


def draw_sentence(rng: random.Random, part: str) -> tuple[Row, str, str]:
    """An instruction that language_reward.py scores. The warm-up repeats its words and writes any sentence."""
    topic, word = (rng.choice(TEXTS[kind][half(part)]) for kind in ("topics", "words"))
    banned, low = rng.choice(TEXTS["banned"]), rng.randint(6, 14)
    high = low + 3
    demands = f"Use the word {word}, and not the word {banned}."
    prompt = f"Write one sentence about {topic}, of {low} to {high} words. {demands}"
    row = {"prompt": prompt, "topic": topic, "word": word, "banned": banned, "low": low, "high": high}
    reason = f"About {topic}, with {word}, without {banned}, {low} to {high} words."
    fillers = [filler for filler in TEXTS["fillers"] if filler not in (banned, word, topic)]
    right_words = ["this", topic, "has", "something", word, *fillers][: rng.randint(low, high)]
    right = " ".join(right_words).capitalize() + "."
    x, y = rng.sample([other for other in TEXTS["topics"]["train"] if other != topic], 2)
    other_word = rng.choice([other for other in TEXTS["words"]["train"] if other != word])
    any_sentence = rng.choice(TEXTS["sentences"]).format(x=x, y=y, w=other_word)
    return row, completion(reason, right), completion(reason, any_sentence)


SHARED = "EVAL_SAMPLES=4 EVAL_STEPS=0 LORA_R=16 LORA_ALPHA=32 PROMPTS_PER_STEP=16 NUM_GENERATIONS=8 TOTAL_STEPS=60"

# A turn is a call without reasoning, of some 20 tokens; its result has twice as many.
DAY = "TASK=tes_day MAX_PROMPT_LEN=800 MAX_COMPLETION_LEN=900 MAX_TURNS=10 MAX_TURN_LEN=40"
TASKS = {
    "stories": Task(draw_story, split_settings(f"{SHARED} REWARDS=gsm8k MAX_COMPLETION_LEN=64")),
    "tickets": Task(draw_ticket, split_settings(f"{SHARED} REWARDS=action MAX_COMPLETION_LEN=64")),
    "sentences": Task(
        draw_sentence, split_settings(f"{SHARED} REWARDS=scripts.dev.language_reward:obeys MAX_COMPLETION_LEN=96")
    ),
    "days": Task(draw_day, split_settings(f"{SHARED} REWARDS=environment {DAY}")),
}
ROWS, HELDOUT_ROWS, WARMUP_ROWS = 600, 200, 3000


def write_rows(task: Task, folder: Path, seed: int) -> None:
    """Writes train.jsonl, heldout.jsonl, warmup.jsonl and right.jsonl, which differ by `seed`."""
    rng = random.Random(seed)
    train = [task.draw(rng, "train") for _ in range(ROWS)]
    heldout = [task.draw(rng, "heldout") for _ in range(HELDOUT_ROWS)]
    warmup = [task.draw(rng, "warmup") for _ in range(WARMUP_ROWS)]
    files = {
        "train": [row for row, _, _ in train],
        "heldout": [row for row, _, _ in heldout],
        "warmup": [with_answer(row, text) for row, _, text in warmup],
        "right": [with_answer(row, text) for row, text, _ in train],
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in files.items():
        write_lines(folder / f"{name}.jsonl", rows)


def with_answer(row: Row, shown: Shown) -> Row:
    """A row of scripts/sft.py: the prompt and the whole completion, or the episode and its calls."""
    if isinstance(shown, list):
        return row | {"calls": shown}
    return {"prompt": row.get("prompt", row.get("question")), "answer": shown}
