# SPDX-License-Identifier: Apache-2.0
"""Runs that are killed at random moments or damaged on disk, continued, and compared with one that was left alone."""

from __future__ import annotations

import contextlib
import csv
import functools
import itertools
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import tempfile
import time
import zipfile
from pathlib import Path
from typing import Any

from grpo.measure.damages import DELETED, KINDS
from grpo.measure.forks import OUTPUT, Campaign, Found, ended, run_to_end, said_in, start, start_command, tasks_done
from grpo.run.durable import MANIFEST, half_of, read_sealed
from grpo.run.folder import ADAPTER, BEST, COMPLETE, checkpoints, complete_steps
from grpo.run.logs import METRICS
from grpo.run.place import DELETING, zip_of
from grpo.settings import ROOT

Settings = dict[str, Any]
# The smallest runs that still save, rotate, evaluate and zip.
SMALL: Settings = {
    "MODEL_ID": "tiny", "TOTAL_STEPS": 4, "SAVE_STEPS": 1, "SAVE_TOTAL_LIMIT": 2, "PROMPTS_PER_STEP": 2, "NUM_GENERATIONS": 4,
    "MAX_COMPLETION_LEN": 6, "EVAL_SAMPLES": 0, "DATA": "data/tes_heldout_compact.csv", "LR_SCHEDULER": "constant", "REWARDS": "action",
}  # fmt: skip
EVALUATED: Settings = {
    "EVAL_SAMPLES": 1,
    "EVAL_STEPS": 2,
    "EVAL_DATA": "rows.csv",
    "BEST_BY": "reward",
    "EVAL_PROFILE": "",
}
PLANT: Settings = {"EVAL_SAMPLES": 1, "EVAL_STEPS": 0, "EVAL_DATA": "heldout.csv", "EVAL_PROFILE": "days.csv"}
VARIANTS: dict[str, Settings] = {
    "padded": {"PACKING": "none"},
    "packed": {"PACKING": "prefix", "SAVE_STEPS": 2, "LOG_PROMPTS": 1, "LR_SCHEDULER": "linear"},
    "dropout": {"LORA_DROPOUT": 0.1, "SAVE_STEPS": 3, "SAVE_TOTAL_LIMIT": 1},
    "evaluated": EVALUATED,
    "report": EVALUATED | {"REPORT": 1, "SAVE_STEPS": 2},
    "plant": PLANT | {"SAVE_STEPS": 2},
    "overwrite": {},  # of a complete run of two steps
}
RARE = {"report": 2, "plant": 1}  # of ten of the others: these take longer
# Runs of two steps that are damaged and given a third: by what is damaged.
DAMAGED: dict[str, Settings] = {"checkpoint": EVALUATED | {"EVAL_STEPS": 0}, "records": PLANT}
COMMAND_EVERY = 10  # of so many runs one goes through the command
COMMAND_START = 10.0  # seconds that its imports may take, while it may be killed too
SIGNALS = {"KILL": 7, "TERM": 1, "INT": 1, "HUP": 1}  # of ten


def differences(folder: Path, whole: Path) -> list[str]:
    """What differs in the run in `folder` from the uninterrupted one in `whole`: rows that do not measure time, and the
    adapter, bit for bit."""
    found = [
        name for name in ("completions.csv", ADAPTER) if (folder / name).read_bytes() != (whole / name).read_bytes()
    ]
    return found + ["metrics.csv"] * (steps_in(folder) != steps_in(whole))


def steps_in(folder: Path) -> list[dict[str, str]]:
    """metrics.csv without its times: rows by column, those of the reward functions among them."""
    with (folder / "metrics.csv").open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        columns = [name for name in reader.fieldnames or () if not (name in METRICS and name.endswith(("_s", "time")))]
        return [{name: row[name] for name in columns} for row in reader]


def faults(place: Path, whole: Path, printed: bool = True, best: bool = True) -> list[str]:
    """What is wrong with the complete run in `place`/run: what differs from the one in `whole`, stray files, the zip, a
    traceback in its log, or if it was `printed`. `best`: best/ is the other's too."""
    folder, wrong = place / "run", differences(place / "run", whole)
    for name in ("evaluation.json", "closed_loop.json", *[f"{BEST}/best.json"] * best):
        if (whole / name).is_file() and read_sealed(folder / name) != read_sealed(whole / name):
            wrong.append(name)
    one, two = (path / BEST / ADAPTER for path in (folder, whole))
    wrong += [f"{BEST}/{ADAPTER}"] * (best and two.exists() and one.read_bytes() != two.read_bytes())
    wrong += [f"stray {path.name}" for path in place.rglob("*") if path.name.endswith((".tmp", ".old"))]
    with zipfile.ZipFile(zip_of(folder)) as archive:
        if archive.testzip() or archive.read(f"run/{ADAPTER}") != (folder / ADAPTER).read_bytes():
            wrong.append("the zip")
    said = said_in(place) if printed else (folder / "training.log").read_text(encoding="utf-8")
    return wrong + ["a traceback"] * ("Traceback" in said)


def prepare(campaign: Campaign, jobs: int) -> None:
    """The uninterrupted runs, once: whole/NAME/run with life.json, its seconds and file operations; those of DAMAGED
    after two steps, whole/NAME-2, and after a third. Raises RuntimeError where one fails."""
    whole = campaign.folder / "whole"
    if whole.exists():
        return
    whole.mkdir(parents=True)
    rows = (ROOT / "data" / "tes_heldout_compact.csv").read_text(encoding="utf-8").splitlines(True)
    days = (ROOT / "data" / "profile_heldout.csv").read_text(encoding="utf-8").splitlines(True)
    (whole / "heldout.csv").write_text("".join(rows[:5]), encoding="utf-8")
    (whole / "days.csv").write_text("".join(days[: 1 + 96]), encoding="utf-8")
    (whole / "rows.csv").write_text("user,reward_action_0,reward_action_1\nStorage 20,0.2,0.9\nStorage 80,0.9,0.3\n")
    makes = [functools.partial(make_whole, campaign, name) for name in variants(campaign)]
    makes += [
        functools.partial(make_damaged, campaign, name)
        for name in DAMAGED
        if not (campaign.quick and name == "records")
    ]
    makes.append(functools.partial(must_end, campaign, whole / "short", SMALL | {"TOTAL_STEPS": 2}))
    batches = [[number] for number in range(len(makes))]
    for _, found in tasks_done(
        lambda place, number, found: makes[number](), campaign.folder / "making", batches, jobs, math.inf
    ):
        for _, text in found.findings:
            raise RuntimeError(text)


def make_whole(campaign: Campaign, name: str) -> None:
    place, began = campaign.folder / "whole" / name, time.perf_counter()
    must_end(campaign, place, settings_of(campaign, name), 0)
    life = {"seconds": time.perf_counter() - began, "operations": int((place / "operations.txt").read_text())}
    (place / "life.json").write_text(json.dumps(life))


def make_damaged(campaign: Campaign, name: str) -> None:
    settings, whole = inputs(campaign, SMALL | DAMAGED[name]), campaign.folder / "whole"
    must_end(campaign, whole / f"{name}-2", settings | {"TOTAL_STEPS": 2})
    shutil.copytree(whole / f"{name}-2", whole / f"{name}-3")
    must_end(campaign, whole / f"{name}-3", settings | {"TOTAL_STEPS": 3})


def must_end(campaign: Campaign, place: Path, settings: Settings, operation: int | None = None) -> None:
    if code := run_to_end(campaign, place, settings, operation):
        raise RuntimeError(f"the uninterrupted run in {place} ended with {code}: {said_in(place)[-2000:]}")


def inputs(campaign: Campaign, settings: Settings) -> Settings:
    """The settings with the files that `prepare` made."""
    ours = ("EVAL_DATA", "EVAL_PROFILE")
    return settings | {name: campaign.folder / "whole" / settings[name] for name in ours if settings.get(name)}


def settings_of(campaign: Campaign, variant: str) -> Settings:
    return inputs(campaign, SMALL | VARIANTS[variant])


def phase(folder: Path, said: str) -> str:
    """Where in its life a run was when it was killed, by what it left and by what its last start wrote into training.log."""
    changed = functools.partial(was_changed_after, folder)
    if (folder / DELETING).exists():
        return "deletion"
    if not (folder / "settings.json").exists():
        return "first_write" if folder.exists() else "checks"
    if half_of(zip_of(folder)).exists():
        return "zip"
    if not said:
        return "checks"
    last = re.findall(r"step (\d+)/(\d+):", said)[-1:]
    unfinished = any(is_unfinished(path) for _, path in checkpoints(folder))
    if unfinished or any((folder / f"{BEST}.{end}").exists() for end in ("tmp", "old")):
        return "saving"
    if not last or last[0][0] != last[0][1]:
        return "steps" if "adapter: " in said else "loading"
    if (folder / COMPLETE).exists() or changed("../run.zip"):
        return "end"
    return "report" if "writing the report" in said else "last_evaluation"


def is_unfinished(checkpoint: Path) -> bool:
    with contextlib.suppress(OSError, ValueError):
        return not read_sealed(checkpoint / MANIFEST)
    return True


def was_changed_after(folder: Path, name: str) -> bool:
    """Whether something is younger than the adapter of the last step."""
    with contextlib.suppress(OSError):
        return (folder / name).stat().st_mtime_ns > (folder / ADAPTER).stat().st_mtime_ns
    return False


def variants(campaign: Campaign) -> dict[str, Settings]:
    return {name: more for name, more in VARIANTS.items() if not (campaign.quick and name == "plant")}


def begin(campaign: Campaign, place: Path, variant: str) -> None:
    """An empty `place`, for OVERWRITE=1 with a complete run of two steps in it."""
    shutil.rmtree(place)
    place.mkdir()
    if variant == "overwrite":
        short = campaign.folder / "whole" / "short"
        shutil.copytree(short / "run", place / "run")
        shutil.copy(short / "run.zip", place)


def kill_once(
    campaign: Campaign, place: Path, settings: Settings, life: dict[str, float], rng: random.Random, command: bool
) -> tuple[int, str, str]:
    """Start the run and send it a signal at a random moment: before a file operation, or after a time. Returns the exit
    code, the signal's name and the moment in words."""
    name = rng.choices(list(SIGNALS), SIGNALS.values())[0]
    number = getattr(signal, f"SIG{name}")
    if command or rng.random() < 0.5:
        seconds = rng.uniform(0, life["seconds"] + command * life["command"])
        pid = start_command(place, settings) if command else start(campaign, place, settings)
        time.sleep(seconds)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
        return ended(pid), name, f"{name} after {seconds:.3f} s"
    operation = rng.randint(1, int(life["operations"]))
    return ended(start(campaign, place, settings, operation, number)), name, f"{name} before operation {operation}"


def kill(campaign: Campaign, place: Path, number: int, found: Found) -> None:
    """One run, killed up to four times, its continuations too; then compared."""
    rng, began, moments, folder = campaign.random("kills", number), time.perf_counter(), [], place / "run"
    command = number % COMMAND_EVERY == COMMAND_EVERY - 1
    names = [name for name, more in variants(campaign).items() if not (command and "REPORT" in more)]
    variant = rng.choices(names, [RARE.get(name, 10) for name in names])[0]
    base, log, code = settings_of(campaign, variant), folder / "training.log", 0
    life = json.loads((campaign.folder / "whole" / variant / "life.json").read_text()) | {"command": COMMAND_START}
    wanted = 1 + sum(rng.random() < share for share in (0.5, 0.5, 0.3))
    begin(campaign, place, variant)
    for _ in range(20):
        if moments and complete_steps(folder) == base["TOTAL_STEPS"]:
            break
        old = (folder / DELETING).exists() or complete_steps(folder) == 2
        settings = base | ({"OVERWRITE": 1} if old else {})
        before = log.stat().st_size if log.exists() and not old else 0
        if len(moments) == wanted:
            pid = start_command(place, settings) if command else start(campaign, place, settings)
            if code := ended(pid):
                break
            continue
        code, name, words = kill_once(campaign, place, settings, life, rng, command)
        if code in (-(signalled := getattr(signal, f"SIG{name}")), 128 + signalled):
            where = phase(folder, log.read_bytes()[before:].decode("utf-8", "replace") if log.exists() else "")
            kinds = ["kills", f"kills_{name}", f"kills_in_{where}"] + ["kills_of_continuations"] * bool(moments)
            found.counts.update(kinds)
            moments.append(f"{words} ({where})")
        elif code:
            break
        elif not moments:  # it ended before: begin again, and kill earlier
            begin(campaign, place, variant)
            life = {name: max(1, 0.7 * value) if name == "operations" else 0.7 * value for name, value in life.items()}
    found.counts.update(["kills_runs"] + ["kills_by_command"] * command)
    wrong = [f"ended with exit code {code}"]
    if complete_steps(folder) == base["TOTAL_STEPS"]:
        wrong = faults(place, campaign.folder / "whole" / variant / "run", not command)
    if wrong:
        found.findings.append(
            (number, f"{', '.join(wrong)}; {variant}{' by the command' * command}: {', '.join(moments)}")
        )
    found.seconds.append(time.perf_counter() - began)


# What the records of a finished run answer when they are damaged, and deleted: words of the refusal, or None where the run goes on.
RECORDS: dict[str, tuple[str | None, str | None]] = {
    "settings.json": ("settings.json is damaged", "no settings.json"),
    "evaluation.json": (None, None),
    "closed_loop.json": (None, None),
    f"{BEST}/best.json": (None, None),
    f"{BEST}/{ADAPTER}": (None, None),
    COMPLETE: (None, None),
}
LOGS = ("metrics.csv", "completions.csv")


def damages(campaign: Campaign) -> list[tuple[str, str, str]]:
    """Every (state of the run, file, kind of damage): each file of its last checkpoint, of a run that is complete and of one that
    was interrupted, then the logs and the records."""
    checkpoint = campaign.folder / "whole" / "checkpoint-2" / "run" / "checkpoint-2"
    names = sorted(str(path.relative_to(checkpoint.parent)) for path in checkpoint.rglob("*") if path.is_file())
    kinds = KINDS | DELETED
    return [
        *itertools.product(("complete", "interrupted"), names, kinds),
        *itertools.product(("complete",), LOGS if campaign.quick else (*LOGS, *RECORDS), kinds),
    ]


def damage(campaign: Campaign, place: Path, number: int, found: Found) -> None:
    """One damaged file in a copy of a run of two steps, which is given a third; then compared."""
    state, name, kind = damages(campaign)[number]
    began, whole, folder = time.perf_counter(), campaign.folder / "whole", place / "run"
    kept = "records" if name in RECORDS else "checkpoint"
    shutil.copytree(whole / f"{kept}-2" / "run", folder)
    if state == "interrupted":
        (folder / COMPLETE).unlink()
        (folder / ADAPTER).unlink()
    (KINDS | DELETED)[kind](folder / name)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    code = run_to_end(campaign, place, inputs(campaign, SMALL | DAMAGED[kept] | {"TOTAL_STEPS": 3}))
    said, base = said_in(place), Path(name).name
    refusal = RECORDS.get(name, (None, None))[kind == "deleted"]
    if name in LOGS and kind in ("truncated", "emptied"):  # an earlier checkpoint may need no more of it
        refusal = f"{name} is shorter than it was then" if code == 2 else None
    elif name in LOGS and kind != "deleted":
        refusal = f"{name} is no longer what was written until checkpoint-2"
    if refusal:
        wrong = [] if code == 2 and refusal in said else [f"ended with {code}, not refused with {refusal!r}"]
        after = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        wrong += ["the folder has changed"] * (before != after) + ["a traceback"] * ("Traceback" in said)
        found.counts["damage_refused"] += 1
    else:
        best = not name.startswith(BEST)
        wrong = [f"ended with {code}"] if code else faults(place, whole / f"{kept}-3" / "run", best=best)
        if name in wrong and kind == "deleted" and name in LOGS:  # it has the rows of the third step alone
            wrong.remove(name)
        words = rf"{re.escape(name.partition('/')[0])}: {re.escape(base)} (is|cannot)"
        if name in LOGS:
            words = rf"{re.escape(name)} is (not there: it begins again at step 3|shorter than it was then)"
        elif name in RECORDS:
            gone = kind == "deleted" and base != ADAPTER  # as in a run that never had it
            words = "" if gone else rf"{re.escape(base)} (is damaged|cannot be read)"
        wrong += ["not told"] * (not re.search(words, said))
        found.counts["damage_continued"] += 1
    found.counts["damage_cases"] += 1
    found.counts["damage_files"] += kind == "zeroed" and state == "complete"
    if wrong:
        found.findings.append((number, f"{', '.join(wrong)}: {name} of a run that was {state}, {kind}"))
    found.seconds.append(time.perf_counter() - began)


DISK = 230  # MiB: a little more than the checks ask for


def can_mount() -> bool:
    """Whether a small disk can be made here: as root, where mounting is allowed."""
    with tempfile.TemporaryDirectory() as folder:
        mounted = not subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True
        ).returncode
        if mounted:
            subprocess.run(["umount", folder], check=True)
        return mounted


def fill_disk(campaign: Campaign, place: Path, number: int, found: Found) -> None:
    """One run on a disk that fills up, to a few random KiB, once the run has begun; then given room and continued."""
    rng, began, disk = campaign.random("disk", number), time.perf_counter(), place / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK}m", "tmpfs", str(disk)], check=True)
    try:
        (place / OUTPUT).touch()
        (disk / OUTPUT).symlink_to(place / OUTPUT)
        settings, folder, wrong = settings_of(campaign, "evaluated"), disk / "run", []
        pid = start(campaign, disk, settings)
        while not (folder / "training.log").exists():
            time.sleep(0.005)
        free = shutil.disk_usage(disk).free - rng.randrange(1000) * 1024
        with (disk / "ballast").open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, max(free, 1))
        code = ended(pid)
        found.counts["disk_met"] += code == 1
        said = (place / OUTPUT).read_text(encoding="utf-8")
        if code:
            last = said.rstrip().splitlines()[-1]
            wrong += [] if code == 1 and "no space left on the disk of OUTPUT_DIR" in last else [f"{code}: {last}"]
            wrong += [f"stray {path.name}" for path in disk.rglob("*.tmp")]
            (disk / "ballast").unlink()
            code = run_to_end(campaign, disk, settings)
        wrong += [f"continued with {code}"] if code else faults(disk, campaign.folder / "whole" / "evaluated" / "run")
        if wrong:
            found.findings.append((number, f"{', '.join(wrong)}\n{said_in(disk)[-3000:]}"))
        found.counts["disk_cases"] += 1
        found.seconds.append(time.perf_counter() - began)
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)
