#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Kill commands and damage their checkpoints: nothing may be lost, nothing be silently wrong.

    python scripts/reliability.py --out docs/results/reliability.json    # all of it, in about an hour of two cores
    python scripts/reliability.py --part kills --size 5 --out few.json   # each command once
    python scripts/reliability.py --part kills --only 13 --out one.json  # case 13 again

docs/reliability.md, "The campaign", says what the parts do. They run on a CPU, without a network. A case's choices
depend on its number and the seed alone, kills after a delay also on the machine's speed. The folder of a case with a
finding is kept. The JSON is written after each case.

Exit codes: 0 no finding, 1 findings (printed, with how to do them again), 2 --run is a folder that no campaign made.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import itertools
import os
import random
import re
import runpy
import shutil
import signal
import subprocess
import sys
import threading
import zipfile
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from grpo.run.durable import read_sealed
from grpo.run.layout import ADAPTER, BEST, COMPLETE, MANIFEST
from grpo.run.logs import METRICS
from grpo.settings import MOST_WHOLE, ROOT, fold, number

# The commands that are killed, as a user would type them, without `python`: the smallest runs that still save, rotate,
# evaluate and zip. `{case}` is the folder of one case, in which each leaves `run` and `run.zip`, `{inputs}` that of the
# inputs.
SMALL = """MODEL_ID=tiny TOTAL_STEPS=4 SAVE_STEPS=1 SAVE_TOTAL_LIMIT=2 PROMPTS_PER_STEP=2 NUM_GENERATIONS=4
    EVAL_SAMPLES=0 MAX_COMPLETION_LEN=6 DATA=data/tes_heldout_compact.csv LR_SCHEDULER=constant REWARDS=action
    OUTPUT_DIR={case}/run"""
EVALUATED = f"{SMALL} EVAL_SAMPLES=1 EVAL_STEPS=2 EVAL_DATA={{inputs}}/rows.csv EVAL_PROFILE= BEST_BY=reward"
PLANT = "EVAL_SAMPLES=1 EVAL_STEPS=0 EVAL_DATA={inputs}/heldout.csv EVAL_PROFILE={inputs}/days.csv SAVE_STEPS=2"
COMMANDS = {
    "padded": f"{SMALL} PACKING=none train_grpo.py",
    "packed": f"{SMALL} PACKING=prefix SAVE_STEPS=2 LOG_PROMPTS=1 LR_SCHEDULER=linear train_grpo.py",
    "dropout": f"{SMALL} LORA_DROPOUT=0.1 SAVE_STEPS=3 SAVE_TOTAL_LIMIT=1 train_grpo.py",
    "evaluated": f"{EVALUATED} train_grpo.py",
    "plant": f"{SMALL} {PLANT} train_grpo.py",
}
# The command whose checkpoint is damaged after two steps, and that then gets a third.
DAMAGED = {str(steps): f"{EVALUATED} EVAL_STEPS=0 TOTAL_STEPS={steps} train_grpo.py" for steps in (2, 3)}
SIGNALS = {"KILL": 7, "TERM": 1, "INT": 1, "HUP": 1}  # how many of ten
KILLS = 60  # cases, unless --size says otherwise; of damage all that there are
OUTPUT, OPERATIONS = "output.txt", "operations.txt"  # in a case's folder: what its starts printed; see `watch_files`
FIGURES = """
kills_cases | runs | killed at random moments and continued by the same command until complete; {kills_asked} asked for
kills_different | runs | of these differ from the uninterrupted run, or left something stray
kills | kills | half just before a random file operation, half up to a second later; at most four of a run
damage_cases | files | damaged, each in a run of its own; {damage_asked} asked for
damage_different | runs | did not say so, or did not come to the result of an undamaged run
"""


def flip_bit(path: Path) -> int:
    """Flips one bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    return path.write_bytes(content)


KINDS: dict[str, Callable[[Path], int]] = {  # what crashes and disks do to a file
    "truncated": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "zeroed": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "emptied": lambda path: path.write_bytes(b""),
    "one bit": flip_bit,
    "garbage": lambda path: path.write_bytes(hashlib.shake_128(b"garbage").digest(path.stat().st_size)),
}
DELETED = {"deleted": Path.unlink}


def watch_files(case: Path, operation: int, number: int, delay: float) -> None:
    """In the command's own process: counts its file operations in `case` into OPERATIONS, and before the one with the
    number `operation`, or `delay` seconds after it began, sends this process the signal `number`. It sees what Python
    opens for writing, makes, renames and deletes; delayed signals also meet the insides of torch.save."""
    begin, count = f"{case}/", 0
    kinds = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.symlink")
    for name in (signal.SIGTERM, signal.SIGHUP):  # The shell that started all this may ignore them.
        signal.signal(name, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    record = os.open(case / OPERATIONS, os.O_CREAT | os.O_WRONLY)
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


def run_command(command: str, case: Path, operation: int = 0, number: int = 0, delay: float = 0.0) -> int:
    """Runs the command in `case` and returns its exit code, that of a signal negative. The rest are those of
    `watch_files`, which sends no signal at operation 0."""
    case.mkdir(parents=True, exist_ok=True)
    inherited = ("PATH", "HOME", "LANG", "XDG_CACHE_HOME", "TMPDIR")
    environment = {name: os.environ[name] for name in inherited if name in os.environ} | {"OMP_NUM_THREADS": "1"}
    environment |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": ""}
    words = [word.format(case=case, inputs=case.parents[1] / "inputs") for word in command.split()]
    settings = dict(word.split("=", 1) for word in words if word.partition("=")[0].isupper())
    watched = ["--child", str(case), str(operation), str(number), str(delay), *words[-1:]]
    with (case / OUTPUT).open("ab") as output:
        return subprocess.run(
            [sys.executable, __file__, *watched], env=environment | settings, cwd=ROOT, timeout=900,
            stdin=subprocess.DEVNULL, stdout=output, stderr=output,
        ).returncode  # fmt: skip


def steps_in(run: Path) -> list[dict[str, str]]:
    """metrics.csv without its times: rows by column, those of the reward functions among them."""
    with (run / "metrics.csv").open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        columns = [name for name in reader.fieldnames or () if not (name in METRICS and name.endswith(("_s", "time")))]
        return [{name: row[name] for name in columns} for row in reader]


def differences(run: Path, whole: Path) -> list[str]:
    """Files of a run that differ from the uninterrupted one in `whole`: rows that do not measure time, and the adapter,
    bit for bit."""
    names = ("completions.csv", ADAPTER)
    different = [name for name in names if (run / name).read_bytes() != (whole / name).read_bytes()]
    return different + (["metrics.csv"] if steps_in(run) != steps_in(whole) else [])


def faults_of(case: Path, whole: Path) -> list[str]:
    """The faults of the complete run in `case`/run: what differs from the one in `whole`, records and the best adapter
    among it, stray files, the zip, a traceback."""
    run = case / "run"
    faults = differences(run, whole)
    for name in ("evaluation.json", "closed_loop.json", f"{BEST}/best.json"):
        if (whole / name).is_file() and read_sealed(run / name) != read_sealed(whole / name):
            faults.append(name)
    best = f"{BEST}/{ADAPTER}"
    if (whole / best).exists() and (run / best).read_bytes() != (whole / best).read_bytes():
        faults.append(best)
    faults += [f"stray {path.name}" for path in case.rglob("*") if path.name.endswith((".tmp", ".old"))]
    with zipfile.ZipFile(case / "run.zip") as archive:
        if archive.testzip() or archive.read(f"run/{ADAPTER}") != (run / ADAPTER).read_bytes():
            faults.append("the zip")
    return faults + (["a traceback"] if "Traceback" in (case / OUTPUT).read_text(errors="replace") else [])


def prepare(folder: Path, part: str) -> None:
    """Makes the uninterrupted runs that a part compares with, in folder/whole, and their inputs. Raises RuntimeError if
    one fails."""
    inputs, whole = folder / "inputs", folder / "whole"
    inputs.mkdir(exist_ok=True)
    for name, data, count in (("heldout.csv", "tes_heldout_compact.csv", 5), ("days.csv", "profile_heldout.csv", 97)):
        lines = (ROOT / "data" / data).read_text(encoding="utf-8").splitlines(True)
        (inputs / name).write_text("".join(lines[:count]), encoding="utf-8")
    (inputs / "rows.csv").write_text("user,reward_action_0,reward_action_1\nStorage 20,0.2,0.9\nStorage 80,0.9,0.3\n")
    for name, command in (COMMANDS if part == "kills" else DAMAGED).items():
        if name == "3":
            shutil.copytree(whole / "2", whole / name)
        if code := run_command(command, whole / name):
            raise RuntimeError(f"the uninterrupted run in {whole / name} ended with {code}")


def kill(folder: Path, case: Path, seed: int, number: int, counts: Counter[str]) -> str:
    """One run, killed one to four times, its continuations too, then compared. Returns its faults in words."""
    rng, name = random.Random(f"kills {seed} {number}"), list(COMMANDS)[number % len(COMMANDS)]
    operations, moments = int((folder / "whole" / name / OPERATIONS).read_text()), []
    for _ in range(rng.choices((1, 2, 3, 4), (5, 3, 1, 1))[0]):
        word = rng.choices(list(SIGNALS), list(SIGNALS.values()))[0]
        signal_number, operation = getattr(signal, f"SIG{word}"), rng.randint(1, operations)
        delay = rng.choice((0.0, rng.uniform(0, 1)))
        code = run_command(COMMANDS[name], case, operation, signal_number, delay)
        if code not in (-signal_number, 128 + signal_number):  # It has ended before the signal came, or by itself.
            break
        moments.append(f"{word} {delay:.2f} s after file operation {operation}")
    else:
        code = run_command(COMMANDS[name], case)
    counts.update(kills_cases=1, kills=len(moments))
    faults = [f"ended with exit code {code}"] if code else faults_of(case, folder / "whole" / name / "run")
    return f"{', '.join(faults)}; {name}: {', '.join(moments)}" if faults else ""


def damages(folder: Path) -> list[tuple[str, str, str]]:
    """Every (state of the run, file, kind of damage), shuffled: each file of its last checkpoint, of a run that is
    complete and of one that was interrupted."""
    run = folder / "whole" / "2" / "run"
    names = sorted(str(path.relative_to(run)) for path in (run / "checkpoint-2").rglob("*") if path.is_file())
    cases = list(itertools.product(("complete", "interrupted"), names, KINDS | DELETED))
    random.Random("damages").shuffle(cases)
    return cases


def damage(folder: Path, case: Path, seed: int, number: int, counts: Counter[str]) -> str:
    """One damaged file in a copy of a run of two steps, which gets a third, then compared. Returns its faults in
    words."""
    state, name, kind = damages(folder)[number]
    run, base = case / "run", Path(name).name
    shutil.copytree(folder / "whole" / "2" / "run", run)
    if state == "interrupted":
        (run / COMPLETE).unlink()
        (run / ADAPTER).unlink()
    (KINDS | DELETED)[kind](run / name)
    code = run_command(DAMAGED["3"], case)
    faults = [f"ended with {code}"] if code else faults_of(case, folder / "whole" / "3" / "run")
    message = rf"checkpoint-2: {re.escape(base)} (is|cannot)"
    if base == MANIFEST and kind == "deleted":
        message = "has no manifest.json"
    if not re.search(message, (case / OUTPUT).read_text(errors="replace")):
        faults.append("not told")
    counts["damage_cases"] += 1
    return f"{', '.join(faults)}: {name} of a run that was {state}, {kind}" if faults else ""


PARTS = {"kills": kill, "damage": damage}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=fold(__doc__), formatter_class=argparse.RawDescriptionHelpFormatter)
    add, count = parser.add_argument, number(1, MOST_WHOLE, int)
    add("--out", required=True, help="JSON to write")
    add("--part", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART", help="kills, damage, or both")
    add("--size", type=count, help="of each part: how many cases")
    add("--seed", type=int, default=1, help="of every choice (default 1)")
    add("--only", type=int, metavar="NUMBER", help="this case of the part")
    add("--jobs", type=count, default=2, help="processes side by side (default 2)")
    add("--run", default="runs/reliability", help="folder of all runs; the last campaign's is deleted")
    return parser.parse_args()


def run_campaign(options: argparse.Namespace, folder: Path) -> int:
    """Runs all cases of the chosen parts; returns the exit code."""
    from grpo.measure.record import save, tabled, write  # late: --help needs no torch

    counts, values = Counter[str](), dict[str, int]()

    def run_case(part: str, number: int) -> str:
        case = folder / part / str(number)
        try:
            finding = PARTS[part](folder, case, options.seed, number, counts)
        except Exception as error:  # A start that hangs, or a file that is not there.
            finding = f"{type(error).__name__}: {error}"
        if not finding:
            shutil.rmtree(case)
        return finding

    for part in options.part:
        prepare(folder, part)
        count = len(damages(folder)) if part == "damage" else options.size or KILLS
        numbers = [options.only] if options.only is not None else list(range(count))[: options.size]
        values |= {f"{part}_asked": len(numbers), f"{part}_different": 0}
        with ThreadPoolExecutor(options.jobs) as pool:
            for number, finding in zip(numbers, pool.map(partial(run_case, part), numbers), strict=True):
                if finding:
                    values[f"{part}_different"] += 1
                    again = f"--part {part} --seed {options.seed} --only {number}"
                    print(f"FOUND {part} {number}: {finding}\n  in {folder / part}; again: {again}", flush=True)
                save(Path(options.out), tabled(FIGURES, {**counts, **values}))
    write(Path(options.out), tabled(FIGURES, {**counts, **values}))
    return int(any(values[f"{part}_different"] for part in options.part))


def main() -> int:
    if sys.argv[1:2] == ["--child"]:  # This is the process that is killed: it runs a script of the project.
        case, operation, signal_number, delay, script = sys.argv[2:]
        watch_files(Path(case), int(operation), int(signal_number), float(delay))
        sys.argv, sys.path[0] = [script], str(ROOT)
        runpy.run_path(script, run_name="__main__")
        return 0
    options = parse_args()
    from grpo.measure.record import fresh_folder  # late: --help needs no torch

    try:
        folder = fresh_folder(Path(options.run).resolve())
    except FileExistsError as error:
        print(error, file=sys.stderr)
        return 2
    return run_campaign(options, folder)


if __name__ == "__main__":
    sys.exit(main())
