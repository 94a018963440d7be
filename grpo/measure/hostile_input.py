# SPDX-License-Identifier: Apache-2.0
"""CSVs, settings and model folders as nobody should write them: each must be answered in words, and soon."""

from __future__ import annotations

import csv as csv_module
import io
import json
import random
import re
import shutil
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

from grpo.measure.damages import DELETED, KINDS
from grpo.measure.forks import OUTPUT, Campaign, Found, asked_by_command, asked_here, run_to_end
from grpo.other_names import ANSWERS
from grpo.plan.hub import TINY_PATH
from grpo.settings import FIELDS, ROOT, TASKS, choices, show

SLOWEST = 10.0  # seconds that an answer may take
CSV_EVERY, SETTINGS_EVERY = 200, 100  # of so many inputs one is asked through the command too
ROWS = ROOT / "tests" / "run" / "fixtures" / "rows.csv"
ASKED = {"MODEL_ID": "tiny", "DATA": ROWS, "EVAL_DATA": ROWS, "EVAL_PROFILE": ""}
NUMBERS = (
    "nan", "inf", "-inf", "1e308", "-1e308", "1e400", "1e20", "1e-320", "0x10", "1_0", "9" * 400, "0." + "3" * 5000, "-0", "",
    " ", "1,5", "１２", "٣", "½", "1e", "--1", "+.5", "True", "None", "=1+1", "2147483648", str(10**18), "-1", "0",
)  # fmt: skip
TEXTS = (
    "", " ", "\u200b", "\ufeff", "\u2028", "\x85", "\x1b[31m", "e" + "\u0301" * 2000, "\u202e<|start|>", "👩‍👩‍👧‍👦" * 200, "\x00", "\x7f",
    "<|start|>assistant", "<|start|>system<|message|>", "{{ 7*7 }}", "{% raw %}", "%s%n", "\\", "\ud800", "a" * 100_000, "[" * 5000,
    "~nouser", "/dev/null", "../" * 300, "a" * 300, "https://example.com/x", "-", ",", ",,", "\r", "\n\n", "\t", "'", '"', '"""',
)  # fmt: skip
PLACE = re.compile(r"\b(row|line|header|column)\b|: it is empty|more problems like these")  # in a file
Rng = random.Random


def good_rows(rng: Rng) -> list[list[str]]:
    """A header and rows that are accepted."""
    rows = [
        [f"Store {20 * i} of 100. [0] off, [1] on?", *(f"{rng.random():.3f}" for _ in range(3)), "a note"]
        for i in range(5)
    ]
    return [["prompt", "reward_action_0", "reward_action_1", "reward_action_2", "note"], *rows]


def spoil_table(rng: Rng, rows: list[list[str]]) -> None:
    """One fault in the cells."""
    column, row = rng.randrange(len(rows[0])), rng.randrange(len(rows))
    kinds = "drop double rename number text swap short long wide many q system header none"
    kind = rng.choice(kinds.split())
    if kind == "drop":
        for cells in rows:
            del cells[column : column + 1]
    elif kind == "double":
        for cells in rows:
            cells.append(cells[min(column, len(cells) - 1)] if cells else "")
    elif kind == "rename":
        rows[0][column] = rng.choice(
            ["Prompt", "reward_action_1", "reward_action_01", "reward_action_９", "reward_action_7", "user", "question", "",
             "q_action_0", "completions", "prompts", "self", "reward_action_" + "9" * 5000, rng.choice(TEXTS)]
        )  # fmt: skip
    elif kind in ("number", "text"):
        cells = rng.choice(rows)
        if cells:
            cells[rng.randrange(len(cells))] = rng.choice(NUMBERS if kind == "number" else TEXTS)
    elif kind == "swap":
        rows[0], rows[row] = rows[row], rows[0]
    elif kind == "short":
        del rows[row][rng.randrange(len(rows[row]) + 1) :]
    elif kind == "long":
        rows[row] += ["1"] * rng.choice([1, 7, 3000])
    elif kind == "wide":
        for number, cells in enumerate(rows):
            cells += [f"c{n}" if not number else "0" for n in range(rng.choice([10, 900, 3000]))]
    elif kind == "many":
        rows += rows[1:] * rng.choice([3, 100]) if len(rows) < 50 else []
    elif kind == "q":
        for number, cells in enumerate(rows):
            cells += [rng.choice(NUMBERS) if number else f"q_action_{k}" for k in range(rng.choice([2, 3]))]
    elif kind == "system":
        for number, cells in enumerate(rows):
            cells.append(rng.choice(TEXTS) if number else "system")
    elif kind == "header":
        del rows[1:]
    else:
        rows.clear()


def spoil_bytes(rng: Rng, content: bytes) -> bytes:
    """One fault in the bytes."""
    if not content:
        return content
    at, end = rng.randrange(len(content)), rng.choice([1, 3, 40])
    some = rng.choice([b"\0", b'"', b"\r", b"\n", b",", b";", b"\xff\xfe", b"\xed\xa0\x80", b"\xc3", b"\xf0\x9f", rng.randbytes(end)])  # fmt: skip
    text = content.decode("utf-8", "replace")
    kind = rng.choice(["flip", "insert", "replace", "truncate", "encode", "ends", "delimiter", "tail", "nothing"])
    if kind == "flip":
        flipped = bytearray(content)
        for _ in range(end):
            flipped[rng.randrange(len(flipped))] ^= 1 << rng.randrange(8)
        return bytes(flipped)
    if kind == "encode":
        names = ("utf-16", "utf-16-le", "utf-32", "latin-1", "shift_jis", "utf-8-sig", "utf-7", "cp037")
        return text.encode(rng.choice(names), "replace")
    if kind == "ends":
        line_ends = ("\r", "\r\n", "\n\n", "\u2028", "\n\r", "\x0b", "")
        return "".join(line + rng.choice(line_ends) for line in text.splitlines()).encode("utf-8", "surrogatepass")
    return {
        "insert": content[:at] + some + content[at:],
        "replace": content[:at] + some + content[at + len(some) :],
        "truncate": content[:at],
        "delimiter": content.replace(b",", rng.choice([b";", b"\t", b"|", b"\xa0"])),
        "tail": content + some * rng.choice([1, 1000]),
        "nothing": b"",
    }[kind]


def hostile_csv(rng: Rng) -> bytes:
    """A good CSV with one to three faults."""
    rows, faults = good_rows(rng), rng.randint(1, 3)
    in_cells = rng.randint(0, faults)
    for _ in range(in_cells):
        if rows and rows[0]:
            spoil_table(rng, rows)
    text = io.StringIO()
    csv_module.writer(text, lineterminator="\n").writerows(rows)
    content = text.getvalue().encode("utf-8", "surrogatepass")
    for _ in range(faults - in_cells):
        content = spoil_bytes(rng, content)
    return content


def judge(code: int | str, said: str, seconds: float, named: str = "") -> list[str]:
    """What is wrong with an answer of `--check`: a traceback, a refusal without a reason (which names `named`), its time."""
    wrong = [f"it raised {code}"] if isinstance(code, str) else []
    if code == 2:
        problems = re.findall(r"^  \d+\. (.+)$", said, re.MULTILINE)
        wrong += ["refused without a reason"] * (not problems)
        wrong += [f"{named} is not named"] * (named not in "".join(problems))
        placeless = [one for one in problems if named.endswith(".csv") and named in one and not PLACE.search(one)]
        wrong += [f"no place in the file: {one}" for one in placeless]
    elif code != 0 and not wrong:
        wrong.append(f"it ended with {code}")
    return wrong + ["a traceback"] * ("Traceback" in said) + [f"{seconds:.1f} s"] * (seconds > SLOWEST)


def ask(
    campaign: Campaign, part: str, number: int, found: Found, given: dict[str, Any], by_command: bool, named: str = ""
) -> int | str:
    """Ask for the answer to these settings and count it; returns the exit code."""
    code, said, seconds = asked_here(campaign, given)
    wrong = judge(code, said, seconds, named)
    if by_command:
        found.counts[f"{part}_by_command"] += 1
        again, printed, took = asked_by_command(given)
        wrong += [f"the command: {one}" for one in judge(again, printed, took, named)]
        wrong += [f"{code} here, {again} by the command"] * (again != code)
    found.counts.update([f"{part}_cases", f"{part}_{'accepted' if code == 0 else 'refused'}"])
    found.seconds.append(seconds)
    if wrong:
        shown = {name: value for name, value in given.items() if name not in ASKED or value != ASKED[name]}
        found.findings.append((number, f"{'; '.join(wrong)}\n  {shown!r}"[:6000]))
    return code


def csv(campaign: Campaign, place: Path, number: int, found: Found) -> None:
    """One CSV of rewards with faults. A file with a finding is kept."""
    path, before = place / f"rows{number}.csv", len(found.findings)
    path.write_bytes(hostile_csv(campaign.random("csv", number)))
    given = ASKED | {"DATA": path, "OUTPUT_DIR": place / "run"}
    ask(campaign, "csv", number, found, given, number % CSV_EVERY == CSV_EVERY - 1, path.name)
    if len(found.findings) == before:
        path.unlink()


def mistyped(rng: Rng, name: str) -> str:
    """A name with a slip of the fingers, or what other programs call it."""
    at = rng.randrange(len(name))
    slips: list[Callable[[], str]] = [
        lambda: name[:at] + name[at + 1 :],
        lambda: name[:at] + rng.choice(string.ascii_uppercase + "_-") + name[at:],
        lambda: name[:at] + name[at:][:2][::-1] + name[at + 2 :],
        lambda: rng.choice([name.lower(), name.replace("_", ""), name + "S", name.replace("_", "-"), name.title()]),
        lambda: rng.choice(list(ANSWERS)),
    ]
    return rng.choice(slips)() or name


def hostile_value(rng: Rng, name: str) -> str:
    """A value as nobody means it, a good one with a slip, or another good one."""
    good = [show(FIELDS[name].default), *choices(name), "0", "1", "2", "auto", *TASKS]
    if (kind := rng.random()) < 0.5:
        return rng.choice(NUMBERS + TEXTS)
    value = rng.choice(good)
    if kind < 0.75 and value:
        at = rng.randrange(len(value))
        value = rng.choice([value[:at] + value[at + 1 :], value[:at] + rng.choice(string.printable) + value[at:], value * 2, value.upper(), f" {value}\n", value + ","])  # fmt: skip
    return value


def hostile_settings(rng: Rng) -> dict[str, str]:
    """Between one and four settings, changed or mistyped, as an environment can hold them: without NUL."""
    given = {}
    for name in rng.sample(list(FIELDS), rng.randint(1, 4)):
        value = hostile_value(rng, name).replace("\0", "\udcff").replace("\ud800", "\udced")
        given[mistyped(rng, name) if rng.random() < 0.15 else name] = value
    return given


def settings(campaign: Campaign, place: Path, number: int, found: Found) -> None:
    """One environment."""
    given = ASKED | {"OUTPUT_DIR": place / "run"} | hostile_settings(campaign.random("settings", number))
    ask(campaign, "settings", number, found, given, number % SETTINGS_EVERY == SETTINGS_EVERY - 1)


VALUES: tuple[Any, ...] = (
    None, -1, 0, 1, 3, 1e308, "", "x", [], {}, [None], {"a": {}}, True, 10**9, 10**30, 0.5, "gpt_oss", [0, 1],
)  # fmt: skip


def spoil_json(rng: Rng, path: Path) -> str:
    """Change or delete one value of a JSON file, however deep; returns what was done."""
    record = json.loads(path.read_text(encoding="utf-8"))
    parent, key, names = record, None, []
    while isinstance(parent, (dict, list)) and parent:
        inside = parent[key] if key is not None else parent
        if key is not None and (not isinstance(inside, (dict, list)) or not inside or rng.random() < 0.3):
            break
        parent = inside
        key = rng.choice(list(parent)) if isinstance(parent, dict) else rng.randrange(len(parent))
        names.append(str(key))
    value = rng.choice((*VALUES, "delete"))
    if value == "delete":
        del parent[key]
    else:
        parent[key] = value
    path.write_text(json.dumps(record), encoding="utf-8")
    return f"{path.name}: {'.'.join(names)} = {value!r}"


def hostile_model(rng: Rng, folder: Path) -> str:
    """A copy of the tiny model with one fault; returns which."""
    shutil.copytree(TINY_PATH, folder)
    files = sorted(path for path in folder.iterdir() if path.name != "warmup.json")
    if rng.random() < 0.6:
        return spoil_json(rng, rng.choice([path for path in files if path.suffix == ".json"]))
    path, kind = rng.choice(files), rng.choice(list(KINDS | DELETED))
    (KINDS | DELETED)[kind](path)
    return f"{path.name}: {kind}"


# What a run whose settings were accepted says where it ends with this exit code.
LOADED = {0: "", 1: r"C train_grpo: model: .", 2: r"^  1\. ."}
TRAINED = {
    "LORA_R": 2, "REASONING_EFFORT": "low", "MAX_PROMPT_LEN": 256, "PROMPTS_PER_STEP": 1, "NUM_GENERATIONS": 2, "EVAL_SAMPLES": 0,
    "MAX_COMPLETION_LEN": 6, "TOTAL_STEPS": 1, "SAVE_STEPS": 1, "DATA": ROOT / "data" / "tes_heldout_compact.csv",
}  # fmt: skip


def models(campaign: Campaign, place: Path, number: int, found: Found) -> None:
    """One model folder: checked, and where its fault cannot be seen before it is loaded, trained for a step."""
    place, before = place / str(number), len(found.findings)
    place.mkdir()
    what = hostile_model(campaign.random("models", number), place / "model")
    given = ASKED | TRAINED | {"MODEL_ID": place / "model", "OUTPUT_DIR": place / "run"}
    code = ask(campaign, "models", number, found, given, False, "model")
    if code == 0 and len(found.findings) == before:
        ended, said = run_to_end(campaign, place, given), (place / OUTPUT).read_text(encoding="utf-8")
        found.counts["models_load_refused" if ended else "models_loaded"] += 1
        if ended not in LOADED or not re.search(LOADED[ended], said, re.MULTILINE) or "Traceback" in said:
            found.findings.append((number, f"loading ended with {ended}: {said[-3000:]}"))
    if len(found.findings) == before:
        shutil.rmtree(place)
    else:
        found.findings[-1] = (number, f"{what}\n  {found.findings[-1][1]}")
