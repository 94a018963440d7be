#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Kill and interrupt every program of the project: nothing may be lost, be silently wrong, or stay behind.

    python scripts/dev/reliability.py --out all.json --jobs 24
    python scripts/dev/reliability.py --part kills --only sft export --size 5 --out few.json
    python scripts/dev/reliability.py --part kills --only sft/13 --out one.json   # case 13 again

docs/maintainers/reliability.md, "The campaign", says what the parts do. All runs on CPU cores, without a network. A
case's choices depend on its name and the seed alone, kills after a delay also on the machine's speed. The folder of a
case with a finding is kept.

Exit codes: 0 no finding, 1 findings (printed, with how to do them again), 2 bad options.
"""

import argparse
import csv
import itertools
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import tomllib
import zipfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from grpo.common import ROOT, in_range, reflow
from grpo.output.layout import ADAPTER, LOGS
from grpo.process.ending import run_script
from grpo.settings.parsing import MOST_WHOLE
from scripts.dev.strike import CASE, MOMENT, NO_SIGNAL, OPERATIONS, STRUCK, Moment, send_signal

# Tracebacks that are not faults: those of an interrupted import, and torchrun's own after a process was killed.
INTERRUPTED_IMPORT = r"<frozen importlib|in <module>\n +(?:from|import) |torch/distributed/run.py"
SIGNALS = (signal.SIGINT, signal.SIGTERM)
PARTS = ("kills", "signals")
OUTPUT, TEMPORARY = "output.txt", "tmp"  # A case's output and its TMPDIR, in its folder.
# What torchrun, Python's tempfile, and killed libraries such as Triton leave in TMPDIR.
OF_OTHERS = r"torchelastic_.*|(?:tmp)?[a-z0-9_]{8}"
LATE_S = {"kills": 120.0, "signals": 40.0}  # Seconds in which the others end after the first process.
TIMED = ("_s", "_s_mean", "time")  # ends of the names of columns that measure time
NOT_COMPARED = ("sha256", "seconds", "date", "machine", "command", "commit", "versions")  # keys of JSON files
FIGURES = """{0}_cases | runs |
{0}_signals | signals | struck them
{0}_different | runs | did not end or continue as they should, had another result, or left something behind
"""
HOOK = f"""import sys
sys.path.insert(0, {str(ROOT)!r})
from scripts.dev.strike import watch_files
sys.path.pop(0)
watch_files()
"""


class Program(NamedTuple):
    """A program as reliability.toml describes it."""

    kills: int
    signals: int
    command: str
    results: str


def read_programs() -> dict[str, Program]:
    """The programs of reliability.toml by their names, with its texts filled in; `{case}` and `{inputs}` stay."""
    tables = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    texts, programs = tables.pop("texts"), {}
    for name, table in tables.items():
        for _ in range(2):  # A text may name another one.
            for key, text in texts.items():
                table |= {field: table[field].replace(f"{{{key}}}", text) for field in ("command", "results")}
        programs[name] = Program(**table)
    return programs


PROGRAMS = read_programs()


def run_command(program: Program, case: Path, moment: Moment = NO_SIGNAL, late_s: float = LATE_S["kills"]) -> int:
    """Runs a program in `case` and returns its exit code, -N after signal N. Raises RuntimeError where other
    processes of the case go on for more than `late_s` seconds."""
    folder = case.parents[1]
    for name in (OPERATIONS, TEMPORARY):
        (case / name).mkdir(parents=True, exist_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    inherited = ("PATH", "HOME", "LANG", "XDG_CACHE_HOME", "LD_LIBRARY_PATH", "PYTHONPATH")
    environment = {name: os.environ[name] for name in inherited if name in os.environ} | {"OMP_NUM_THREADS": "1"}
    environment |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": ""}
    environment |= {CASE: str(case), MOMENT: " ".join(moment), "TMPDIR": str(case / TEMPORARY)}
    environment["PYTHONPATH"] = f"{folder / 'hook'}:{environment.get('PYTHONPATH', '')}".rstrip(":")
    environment["PYTHONHASHSEED"] = "0"  # PEFT writes a set as a list.
    environment["PET_MASTER_PORT"] = str(port)  # torchrun's own would be the same for all cases.
    words = [word.format(case=case, inputs=folder / "inputs") for word in program.command.split()]
    settings = list(itertools.takewhile(lambda word: word.partition("=")[0].isupper(), words))
    environment |= dict(word.split("=", 1) for word in settings)
    command = [sys.executable, *words[len(settings) :]]
    with (case / OUTPUT).open("ab") as output:
        code = subprocess.run(
            command, env=environment, cwd=ROOT, timeout=300, stdin=subprocess.DEVNULL, stdout=output, stderr=output
        ).returncode
    deadline = time.monotonic() + late_s
    while commands := send_signal(str(case), "all", 0):
        if time.monotonic() > deadline:
            send_signal(str(case), "all", signal.SIGKILL)
            raise RuntimeError(f"went on for {late_s:.0f} s after {' '.join(moment)}: {'; '.join(commands)}")
        time.sleep(0.1)
    return code


def content(path: Path, case: Path) -> object:
    """What a result of a case holds, without times and without the case's own path."""
    if path.name in LOGS:
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        return [{name: value for name, value in row.items() if not name.endswith(TIMED)} for row in rows]
    if path.suffix == ".zip":
        with zipfile.ZipFile(path) as archive:
            return archive.testzip(), archive.read(f"{path.stem}/{ADAPTER}")
    data = path.read_bytes().replace(str(case).encode(), b"{case}")
    if path.suffix != ".json":
        return data
    record = json.loads(data)
    return {name: value for name, value in record.items() if name not in NOT_COMPARED}


def differences(program: Program, case: Path, whole: Path) -> list[str]:
    """The results in `case` that are not as in the undisturbed case `whole`."""
    names = [path.relative_to(whole) for pattern in program.results.split() for path in sorted(whole.glob(pattern))]
    return [
        str(name)
        for name in names
        if not (case / name).exists() or content(case / name, case) != content(whole / name, whole)
    ]


def faults_of(program: Program, case: Path, whole: Path) -> list[str]:
    """The faults of a case that has ended: what differs from the undisturbed one, stray files, a traceback."""
    faults = differences(program, case, whole)
    stray = [path.name for path in case.rglob("*") if path.name.endswith((".tmp", ".old"))]
    stray += [path.name for path in (case / TEMPORARY).iterdir() if not re.fullmatch(OF_OTHERS, path.name)]
    faults += [f"stray {name}" for name in stray]
    tracebacks = re.findall(r"Traceback \(most.*\n(?: .*\n)+", (case / OUTPUT).read_text(errors="replace"))
    if any(not re.search(INTERRUPTED_IMPORT, traceback) for traceback in tracebacks):
        faults.append("a traceback")
    return faults


def run_whole(folder: Path, name: str) -> None:
    """Runs a program undisturbed, in folder/whole. Raises RuntimeError if it fails."""
    whole = folder / "whole" / name
    if not whole.exists() and (code := run_command(PROGRAMS[name], whole)):
        raise RuntimeError(f"the undisturbed {name} in {whole} ended with {code}")


def prepare(folder: Path, names: list[str], jobs: int) -> None:
    """Makes the inputs, an adapter among them, and the undisturbed case of each program."""
    inputs = folder / "inputs"
    for path in (inputs / "profiles", folder / "hook"):
        path.mkdir(parents=True, exist_ok=True)
    (folder / "hook" / "sitecustomize.py").write_text(HOOK)
    rows = (ROOT / "data" / "tes_heldout_compact.csv").read_text(encoding="utf-8").splitlines(True)
    header, *hours = (ROOT / "data" / "profile_heldout.csv").read_text(encoding="utf-8").splitlines(True)
    (inputs / "heldout.csv").write_text("".join(rows[:5]), encoding="utf-8")
    for name, part in {"days.csv": hours[:96], "profiles/a.csv": hours[:96], "profiles/b.csv": hours[96:192]}.items():
        (inputs / name).write_text(header + "".join(part), encoding="utf-8")
    (inputs / "rows.csv").write_text("user,reward_action_0,reward_action_1\nStorage 20,0.2,0.9\nStorage 80,0.9,0.3\n")
    if any("{inputs}/adapter" in PROGRAMS[name].command for name in names):
        run_whole(folder, "sft")
        shutil.copytree(folder / "whole" / "sft" / "adapter", inputs / "adapter", dirs_exist_ok=True)
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(lambda name: run_whole(folder, name), names))


def attack(folder: Path, part: str, name: str, number: int, seed: int) -> tuple[str, int]:
    """Runs one case, which is killed one to three times or interrupted once, continued, and then compared.
    Returns (its faults in words, how many signals struck)."""
    rng, program, whole = random.Random(f"{part} {seed} {name} {number}"), PROGRAMS[name], folder / "whole" / name
    case, moments = folder / part / f"{name}-{number}", []
    roles = {path.name: int(path.read_text()) for path in (whole / OPERATIONS).iterdir()}
    for _ in range(1 if part == "signals" else rng.choices((1, 2, 3), (7, 2, 1))[0]):
        role, sent, scope = rng.choice(sorted(roles)), SIGNALS[number % 2], "first"
        if part == "kills":
            sent, scope = signal.SIGKILL, rng.choice(("self", "first", "all"))
        delay = rng.choice((0.0, 0.0, rng.uniform(0, 1)))
        moment = Moment(role, str(rng.randint(1, roles[role])), str(int(sent)), f"{delay:.3f}", scope)
        struck = case / OPERATIONS / STRUCK
        code = run_command(program, case, moment, LATE_S[part])
        if not struck.exists():  # The program ended before the signal.
            break
        struck.unlink()
        moments.append(" ".join(moment))
        if part == "signals" and code not in (0, -sent, 128 + sent):
            return f"ended with exit code {code} after {moments[-1]}", 1
    else:
        code = run_command(program, case)
    # A program that was complete when it was killed may refuse to run again, with 2, which torchrun turns into 1.
    refusal = 1 if name == "torchrun" else 2
    fails = code and (code != refusal or differences(program, case, whole))
    faults = [f"ended with exit code {code}"] if fails else faults_of(program, case, whole)
    if code == refusal:  # The next rank that needs a scratch folder would have removed the one of a killed rank.
        faults = [fault for fault in faults if not fault.startswith("stray train_grpo-scratch")]
    return f"{', '.join(faults)}; {', '.join(moments)}" if faults else "", len(moments)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=reflow(__doc__), formatter_class=argparse.RawDescriptionHelpFormatter)
    add, count = parser.add_argument, in_range(1, MOST_WHOLE, int)
    add("--out", required=True, type=Path, help="JSON to write")
    add("--part", nargs="+", choices=PARTS, default=PARTS, metavar="PART", help="kills, signals, or both (default)")
    add("--only", nargs="+", default=[], metavar="NAME[/NUMBER]", help=f"programs or cases, of {', '.join(PROGRAMS)}")
    add("--size", type=count, help="at most so many cases of each program and part")
    add("--seed", type=int, default=1, help="of every choice (default 1)")
    add("--jobs", type=count, default=2, help="cases side by side (default 2)")
    text = "folder of all cases; the last campaign's is deleted"
    add("--run", type=Path, default=Path("runs/reliability"), help=text)
    options = parser.parse_args()
    options.chosen = {}  # Program -> the numbers of its chosen cases, [] for all.
    for word in options.only or PROGRAMS:
        name, _, number = word.partition("/")
        if name not in PROGRAMS:
            parser.error(f"--only {name}: no program has this name")
        if number and not number.isdecimal():
            parser.error(f"--only {word}: {number} is not the number of a case")
        options.chosen.setdefault(name, []).extend([int(number)] if number else [])
    return options


def chosen_cases(options: argparse.Namespace) -> list[tuple[str, str, int]]:
    """(part, program, number) of the chosen cases."""
    cases = []
    for part, (name, numbers) in itertools.product(options.part, options.chosen.items()):
        limit = getattr(PROGRAMS[name], part)
        cases += [(part, name, number) for number in numbers or range(min(limit, options.size or limit))]
    return cases


def main() -> int:
    options = parse_args()
    from scripts.dev.record import fresh_folder, tabled, write  # Imported here: --help needs no torch.

    folder, cases, values = fresh_folder(options.run.resolve()), chosen_cases(options), Counter[str]()
    prepare(folder, sorted({name for _, name, _ in cases}), options.jobs)

    def run_case(case: tuple[str, str, int]) -> tuple[str, int]:
        part, name, number = case
        try:
            finding, signals = attack(folder, part, name, number, options.seed)
        except Exception as error:  # A start that hangs, a process that goes on, or a file that is not there.
            finding, signals = f"{type(error).__name__}: {error}", 0
            send_signal(str(folder / part / f"{name}-{number}"), "all", signal.SIGKILL)
        if not finding:
            shutil.rmtree(folder / part / f"{name}-{number}")
        return finding, signals

    with ThreadPoolExecutor(options.jobs) as pool:
        for (part, name, number), (finding, signals) in zip(cases, pool.map(run_case, cases), strict=True):
            figures = {"cases": 1, "signals": signals, "different": bool(finding)}
            values.update({f"{part}_{name}_{figure}": count for figure, count in figures.items()})
            if finding:
                again = f"--part {part} --seed {options.seed} --only {name}/{number}"
                print(f"FOUND {part} {name}/{number}: {finding}\n  in {folder / part}; again: {again}", flush=True)
    table = "".join(FIGURES.format(f"{part}_{name}") for part, name in dict.fromkeys((p, n) for p, n, _ in cases))
    write(options.out, tabled(table, values))
    return int(any(values[f"{part}_{name}_different"] for part, name, _ in cases))


if __name__ == "__main__":
    sys.exit(run_script(main))
