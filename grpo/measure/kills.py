# SPDX-License-Identifier: Apache-2.0
"""Commands that are killed at random moments, or whose files are damaged, continued, and compared with ones that were
left alone."""

from __future__ import annotations

import csv
import hashlib
import itertools
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import zipfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from grpo.run.durable import read_sealed
from grpo.run.folder import ADAPTER, BEST, COMPLETE, complete_steps
from grpo.run.layout import MANIFEST
from grpo.run.logs import METRICS
from grpo.settings import ROOT

OUTPUT, OPERATIONS = (
    "output.txt",
    "operations.txt",
)  # beside a run's folder: all that its starts printed; see `watch_files`
LIMIT = 900.0  # seconds after which a start is ended
# The commands that are killed, as a user would type them, without `python`. `{place}` is the folder of one case, in
# which each leaves `run` and `run.zip`, `{inputs}` that of the inputs. These are the smallest runs that still save,
# rotate, evaluate and zip.
SMALL = """MODEL_ID=tiny TOTAL_STEPS=4 SAVE_STEPS=1 SAVE_TOTAL_LIMIT=2 PROMPTS_PER_STEP=2 NUM_GENERATIONS=4
    EVAL_SAMPLES=0 MAX_COMPLETION_LEN=6 DATA=data/tes_heldout_compact.csv LR_SCHEDULER=constant REWARDS=action
    OUTPUT_DIR={place}/run"""
EVALUATED = f"{SMALL} EVAL_SAMPLES=1 EVAL_STEPS=2 EVAL_DATA={{inputs}}/rows.csv EVAL_PROFILE= BEST_BY=reward"
PLANT = "EVAL_SAMPLES=1 EVAL_STEPS=0 EVAL_DATA={inputs}/heldout.csv EVAL_PROFILE={inputs}/days.csv SAVE_STEPS=2"
COMMANDS = {
    "padded": f"{SMALL} PACKING=none train_grpo.py",
    "packed": f"{SMALL} PACKING=prefix SAVE_STEPS=2 LOG_PROMPTS=1 LR_SCHEDULER=linear train_grpo.py",
    "dropout": f"{SMALL} LORA_DROPOUT=0.1 SAVE_STEPS=3 SAVE_TOTAL_LIMIT=1 train_grpo.py",
    "evaluated": f"{EVALUATED} train_grpo.py",
    "plant": f"{SMALL} {PLANT} train_grpo.py",
}
SIGNALS = {"KILL": 7, "TERM": 1, "INT": 1, "HUP": 1}  # of ten


def flip_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


KINDS: dict[str, Callable[[Path], object]] = {  # what crashes and disks do to a file
    "truncated": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "zeroed": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "emptied": lambda path: path.write_bytes(b""),
    "one bit": flip_bit,
    "garbage": lambda path: path.write_bytes(hashlib.shake_128(b"garbage").digest(path.stat().st_size)),
}
DELETED = {"deleted": Path.unlink}


def watch_files(place: Path, operation: int, number: int, delay: float) -> None:
    """In the command's own process: counts its file operations in `place` into OPERATIONS, and before the one that is
    number `operation`, or `delay` seconds after it began, sends this process the signal `number`. It sees what Python
    opens for writing, makes, renames and deletes; delayed signals meet the insides of torch.save and safetensors as
    well."""
    begin, count = f"{place}/", 0
    kinds = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.symlink")
    for name in (signal.SIGTERM, signal.SIGHUP):  # The shell that started all this may ignore them.
        signal.signal(name, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    record = os.open(place / OPERATIONS, os.O_CREAT | os.O_WRONLY)
    timer = threading.Timer(delay, os.kill, (os.getpid(), number))
    timer.daemon = True

    def hook(event: str, arguments: tuple) -> None:
        nonlocal count
        if event not in kinds or not str(arguments[0]).startswith(begin):
            return
        if event == "open" and not arguments[2] & (os.O_WRONLY | os.O_RDWR):
            return
        count += 1
        if count == operation:
            timer.start() if delay else os.kill(os.getpid(), number)
        os.pwrite(record, f"{count:9d}".encode(), 0)

    sys.addaudithook(hook)


def run_command(command: str, place: Path, operation: int = 0, number: int = 0, delay: float = 0.0) -> int:
    """Runs the command in `place` and returns its exit code, that of a signal negative. The rest are those of
    `watch_files`, which sends no signal at operation 0."""
    place.mkdir(parents=True, exist_ok=True)
    environment = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": ""}
    kept = ("PATH", "HOME", "LANG", "XDG_CACHE_HOME", "TMPDIR")
    environment |= {name: os.environ[name] for name in kept if name in os.environ} | {"OMP_NUM_THREADS": "1"}
    words = [word.format(place=place, inputs=place.parents[1] / "inputs") for word in command.split()]
    settings = [word.split("=", 1) for word in words if word.partition("=")[0].isupper()]
    watch = [str(place), str(operation), str(number), str(delay)]
    words = [sys.executable, "scripts/reliability.py", "--child", *watch, *words[len(settings) :]]
    with (place / OUTPUT).open("ab") as output:
        files = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output}
        return subprocess.run(words, env=environment | dict(settings), cwd=ROOT, timeout=LIMIT, **files).returncode


def output_of(place: Path) -> str:
    """All that the starts in `place` printed and logged."""
    files = (place / OUTPUT, place / "run" / "training.log")
    return "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in files if path.is_file())


def steps_in(run: Path) -> list[dict[str, str]]:
    """metrics.csv without its times: rows by column, those of the reward functions among them."""
    with (run / "metrics.csv").open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        columns = [name for name in reader.fieldnames or () if not (name in METRICS and name.endswith(("_s", "time")))]
        return [{name: row[name] for name in columns} for row in reader]


def differences(run: Path, whole: Path) -> list[str]:
    """What differs in a run from the uninterrupted one in `whole`: rows that do not measure time, and the adapter, bit
    for bit."""
    names = ("completions.csv", ADAPTER)
    different = [name for name in names if (run / name).read_bytes() != (whole / name).read_bytes()]
    return different + ["metrics.csv"] * (steps_in(run) != steps_in(whole))


def faults(place: Path, whole: Path) -> list[str]:
    """What is wrong with the complete run in `place`/run: what differs from the one in `whole`, records and the best
    adapter among it, stray files, the zip, a traceback."""
    run, wrong = place / "run", differences(place / "run", whole)
    for name in ("evaluation.json", "closed_loop.json", f"{BEST}/best.json"):
        if (whole / name).is_file() and read_sealed(run / name) != read_sealed(whole / name):
            wrong.append(name)
    ours, theirs = (folder / BEST / ADAPTER for folder in (run, whole))
    wrong += [f"{BEST}/{ADAPTER}"] * (theirs.exists() and ours.read_bytes() != theirs.read_bytes())
    wrong += [f"stray {path.name}" for path in place.rglob("*") if path.name.endswith((".tmp", ".old"))]
    with zipfile.ZipFile(place / "run.zip") as archive:
        if archive.testzip() or archive.read(f"run/{ADAPTER}") != (run / ADAPTER).read_bytes():
            wrong.append("the zip")
    return wrong + ["a traceback"] * ("Traceback" in output_of(place))


def damaged(steps: int) -> str:
    """The command whose checkpoint is damaged after two steps, and that is given a third."""
    return f"{EVALUATED} EVAL_STEPS=0 TOTAL_STEPS={steps} train_grpo.py"


def prepare(folder: Path, part: str) -> None:
    """The uninterrupted runs that a part compares with, in folder/whole, and their inputs. Raises RuntimeError if one
    fails."""
    inputs, whole = folder / "inputs", folder / "whole"
    inputs.mkdir(exist_ok=True)
    for name, data, lines in (("heldout.csv", "tes_heldout_compact.csv", 5), ("days.csv", "profile_heldout.csv", 97)):
        text = (ROOT / "data" / data).read_text(encoding="utf-8").splitlines(True)
        (inputs / name).write_text("".join(text[:lines]), encoding="utf-8")
    rows = "user,reward_action_0,reward_action_1\nStorage 20,0.2,0.9\nStorage 80,0.9,0.3\n"
    (inputs / "rows.csv").write_text(rows, encoding="utf-8")
    for name, command in (COMMANDS if part == "kills" else {"two": damaged(2), "three": damaged(3)}).items():
        if name == "three":
            shutil.copytree(whole / "two", whole / name)
        if code := run_command(command, whole / name):
            raise RuntimeError(f"the uninterrupted run in {whole / name} ended with {code}")


def kill(folder: Path, place: Path, seed: int, number: int, counts: Counter[str]) -> str:
    """One run, killed one to four times, its continuations too, then compared. Returns what was wrong with it."""
    rng, name = random.Random(f"kills {seed} {number}"), list(COMMANDS)[number % len(COMMANDS)]
    wanted, most = rng.choices((1, 2, 3, 4), (5, 3, 1, 1))[0], int((folder / "whole" / name / OPERATIONS).read_text())
    code, moments = 1, []
    while code and not complete_steps(place / "run"):
        if len(moments) == wanted:
            code = run_command(COMMANDS[name], place)
            break
        word = rng.choices(list(SIGNALS), list(SIGNALS.values()))[0]
        signal_number, operation = getattr(signal, f"SIG{word}"), rng.randint(1, most)
        delay = rng.choice((0.0, rng.uniform(0, 1)))
        code = run_command(COMMANDS[name], place, operation, signal_number, delay)
        if code in (-signal_number, 128 + signal_number):
            moments.append(f"{word} {delay:.2f} s after file operation {operation}")
            counts.update(["kills", f"kills_{word}"])
        elif code:
            break
        elif not moments:  # It ended before the signal came: begin again, and kill earlier.
            shutil.rmtree(place)
            code, most = 1, max(1, most * 2 // 3)
    counts["kills_cases"] += 1
    is_complete = code == 0 or complete_steps(place / "run")
    wrong = faults(place, folder / "whole" / name / "run") if is_complete else [f"ended with exit code {code}"]
    return f"{', '.join(wrong)}; {name}: {', '.join(moments)}" if wrong else ""


def damages(folder: Path) -> list[tuple[str, str, str]]:
    """Every (state of the run, file, kind of damage): each file of its last checkpoint, of a run that is complete and
    of one that was interrupted."""
    two = folder / "whole" / "two" / "run"
    names = sorted(str(path.relative_to(two)) for path in (two / "checkpoint-2").rglob("*") if path.is_file())
    return list(itertools.product(("complete", "interrupted"), names, KINDS | DELETED))


def damage(folder: Path, place: Path, seed: int, number: int, counts: Counter[str]) -> str:
    """One damaged file in a copy of a run of two steps, which is given a third, then compared. Returns what was
    wrong."""
    state, name, kind = damages(folder)[number]
    ours, base = place / "run", Path(name).name
    shutil.copytree(folder / "whole" / "two" / "run", ours)
    if state == "interrupted":
        (ours / COMPLETE).unlink()
        (ours / ADAPTER).unlink()
    (KINDS | DELETED)[kind](ours / name)
    code = run_command(damaged(3), place)
    wrong = [f"ended with {code}"] if code else faults(place, folder / "whole" / "three" / "run")
    told = rf"checkpoint-2: {re.escape(base)} (is|cannot)"
    if base == MANIFEST and kind == "deleted":
        told = "has no manifest.json"
    wrong += ["not told"] * (not re.search(told, output_of(place)))
    counts["damage_cases"] += 1
    return f"{', '.join(wrong)}: {name} of a run that was {state}, {kind}" if wrong else ""


PARTS = {"kills": kill, "damage": damage}
