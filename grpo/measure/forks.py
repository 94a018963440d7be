# SPDX-License-Identifier: Apache-2.0
"""Many runs from one process that has imported everything: each a fork of it, so that none pays for the imports."""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from grpo.measure.record import SCRIPT
from grpo.settings import ROOT

OUTPUT = "output.txt"  # beside a run's folder: all that its starts printed
FOUND = "found.json"
MARK = "made_by_a_measurement"  # in a folder that the next one may delete
LIMIT = 900.0  # seconds after which a task is ended: a finding
CHANGES = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.symlink")


def fresh_folder(path: Path) -> Path:
    """An empty folder for all that a measurement makes, marked as that: what an earlier one left there is deleted. Raises
    FileExistsError for what no measurement made."""
    if path.exists() and not (path / MARK).is_file():
        raise FileExistsError(
            f"--run {path} exists, and no measurement made it. Name another folder, or delete it yourself"
        )
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True, exist_ok=True)
    (path / MARK).touch()
    return path


@dataclass
class Found:
    """What some numbers of a part came to: counts, the seconds of each, and findings, each (number, text)."""

    counts: Counter[str] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)
    findings: list[tuple[int, str]] = field(default_factory=list)

    def add(self, other: Found) -> None:
        self.counts.update(other.counts)
        self.seconds += other.seconds
        self.findings += other.findings


@dataclass(frozen=True)
class Campaign:
    """What all parts share: the entry point's `main`, the folder for everything that is made, the seed of every choice."""

    main: Callable[[list[str]], int]
    folder: Path
    seed: int
    quick: bool = False  # without the plant's closed loop, which takes most of the time

    def random(self, part: str, number: int) -> random.Random:
        """The random numbers of one number of a part, whatever else is run."""
        return random.Random(f"{part} {self.seed} {number}")


def clean_environment(settings: Mapping[str, object]) -> dict[str, str]:
    """These settings, and of this process's variables only what every program needs."""
    kept = {
        name: os.environ[name] for name in ("PATH", "HOME", "LANG", "XDG_CACHE_HOME", "TMPDIR") if name in os.environ
    }
    kept |= {
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }
    return kept | {name: str(value) for name, value in settings.items()}


def fresh_signals() -> None:
    """As a terminal's process has them: a shell's background and `nohup` let children ignore some."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for name in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(name, signal.SIG_DFL)


def signal_before(operation: int, place: Path, number: int) -> None:
    """Have this process send itself the signal `number` before it makes, deletes, renames or opens for writing a file in
    `place` for the time that `operation` says, counted from 1; 0: write the count into OPERATIONS at each. Only what Python does
    counts: the insides of torch.save and safetensors are met by kills at a time."""
    begin, seen = f"{place}/", 0

    def hook(event: str, arguments: tuple) -> None:
        nonlocal seen
        if event not in CHANGES or not str(arguments[0]).startswith(begin) or str(arguments[0]).endswith(OUTPUT):
            return
        if event == "open" and not arguments[2] & (os.O_WRONLY | os.O_RDWR):
            return
        seen += 1
        if seen == operation:
            os.kill(os.getpid(), number)
        elif not operation:
            os.pwrite(count, f"{seen:9d}".encode(), 0)

    count = -1 if operation else os.open(place / "operations.txt", os.O_CREAT | os.O_WRONLY)
    sys.addaudithook(hook)


def start(
    campaign: Campaign, place: Path, settings: Mapping[str, object], operation: int | None = None, number: int = 0
) -> int:
    """Start a run in the folder `place`/run by forking; returns its process id. `operation` and `number` are those of
    `signal_before`, None: nothing is counted. Without REPORT among the settings, it leaves the report out: its plots
    take longer than the rest. A Ctrl-C before `main` begins waits until then, and ends it with exit code 130."""
    sys.stdout.flush()
    sys.stderr.flush()
    signals = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    if pid := os.fork():
        signal.pthread_sigmask(signal.SIG_SETMASK, signals)
        return pid
    code, begun = 70, False
    try:
        with (place / OUTPUT).open("ab") as output, open(os.devnull, "rb") as nothing:
            for stream, file in ((0, nothing), (1, output), (2, output)):
                os.dup2(file.fileno(), stream)
        given = dict(settings) | {"OUTPUT_DIR": place / "run"}
        if not given.pop("REPORT", None):
            from grpo.evaluate import page

            page.write_report = lambda folder: folder
        os.environ.clear()
        os.environ.update(clean_environment(given))
        if operation is not None:
            signal_before(operation, place, number)
        signal.pthread_sigmask(signal.SIG_SETMASK, signals)
        begun = True
        code = campaign.main([])
        sys.stdout.flush()
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) and not begun:
            code = 128 + signal.SIGINT
        else:
            traceback.print_exc()
    finally:
        os._exit(code)


def start_command(place: Path, settings: Mapping[str, object]) -> int:
    """The same through the command that a user starts; returns its process id."""
    given = clean_environment({k: v for k, v in settings.items() if k != "REPORT"} | {"OUTPUT_DIR": place / "run"})
    with (place / OUTPUT).open("ab") as output:
        return subprocess.Popen(
            [sys.executable, str(SCRIPT)], env=given, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output, stderr=output
        ).pid


def ended(pid: int) -> int:
    """The exit code of a run once it has ended, that of a signal negative."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def run_to_end(campaign: Campaign, place: Path, settings: Mapping[str, object], operation: int | None = None) -> int:
    """A run without a kill: its exit code."""
    place.mkdir(parents=True, exist_ok=True)
    return ended(start(campaign, place, settings, operation))


def said_in(place: Path) -> str:
    """All that the starts in `place` printed and logged."""
    files = (place / OUTPUT, place / "run" / "training.log")
    return "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in files if path.is_file())


def asked_here(campaign: Campaign, settings: Mapping[str, object]) -> tuple[int | str, str, float]:
    """`train_grpo.py --check` in this process, whose environment it changes: its exit code, or a traceback where it raised;
    what it printed, and its seconds."""
    os.environ.clear()
    os.environ.update(clean_environment(settings))
    out, started = io.StringIO(), time.perf_counter()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            code: int | str = campaign.main(["--check"])
    except BaseException:
        code = traceback.format_exc()
    return code, out.getvalue(), time.perf_counter() - started


def asked_by_command(settings: Mapping[str, object]) -> tuple[int, str, float]:
    """The same through the command: its exit code, what it printed, and its seconds."""
    started = time.perf_counter()
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--check"], env=clean_environment(settings), cwd=ROOT, capture_output=True, timeout=LIMIT
    )  # fmt: skip
    said = (done.stdout + done.stderr).decode("utf-8", "replace")
    return done.returncode, said, time.perf_counter() - started


Work = Callable[[Path, int, Found], None]


def task(work: Work, place: Path, numbers: Sequence[int]) -> int:
    """Fork a process, the first of a group, that does `work` for each number and leaves FOUND in `place`; returns its id."""
    if pid := os.fork():
        return pid
    try:
        os.setpgid(0, 0)
        fresh_signals()
        os.chdir(ROOT)
        found = Found()
        for number in numbers:
            try:
                work(place, number, found)
            except Exception:
                found.findings.append((number, f"the campaign itself failed: {traceback.format_exc()}"))
        (place / FOUND).write_text(json.dumps(vars(found)), encoding="utf-8")
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def tasks_done(
    work: Work, folder: Path, batches: Iterable[Sequence[int]], jobs: int, until: float
) -> Iterator[tuple[Path, Found]]:
    """Do `work` for all numbers, `jobs` batches at a time, each in a process and a new folder of its own below `folder`; yields that
    folder and what was found, as they end. After `until` (of time.monotonic) none is begun."""
    waiting, running = iter(batches), {}
    try:
        while True:
            while len(running) < jobs and time.monotonic() < until and (numbers := next(waiting, None)):
                place = folder / str(numbers[0])
                place.mkdir(parents=True)
                running[task(work, place, numbers)] = place, numbers, time.monotonic()
            if not running:
                return
            for pid, (place, numbers, began) in list(running.items()):
                over = time.monotonic() - began > LIMIT
                if over:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(pid, signal.SIGKILL)
                if os.waitpid(pid, 0 if over else os.WNOHANG)[0]:
                    del running[pid]
                    yield place, found_in(place, numbers[0])
            time.sleep(0.01)
    finally:
        for pid in running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def found_in(place: Path, number: int) -> Found:
    """What a task left; a finding where it left nothing."""
    try:
        record = json.loads((place / FOUND).read_text(encoding="utf-8"))
    except OSError:
        return Found(findings=[(number, f"its process crashed, or took more than {LIMIT:.0f} s")])
    return Found(Counter(record["counts"]), record["seconds"], [(n, text) for n, text in record["findings"]])
