# SPDX-License-Identifier: Apache-2.0
"""The files of scripts/cloud, as far as they can be tested without Docker, SkyPilot or a cloud."""

from __future__ import annotations

import contextlib
import fnmatch
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from helpers import ROOT, run_python, write_commands
from runs import environment, go_on, has_line, wait_until

from grpo.output.checkpoints import checkpoint_fault
from grpo.settings.environment import load_settings
from grpo.settings.help import setting_rows

CLOUD = ROOT / "scripts/cloud"
SKY_TEXT = (CLOUD / "sky.yaml").read_text(encoding="utf-8")
SKY = yaml.safe_load(SKY_TEXT)
IGNORED = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]


def in_image(name: str) -> bool:
    """Whether .dockerignore lets a file or folder at the top of the project into the image."""
    return any(fnmatch.fnmatch(name, line[1:]) for line in IGNORED if line.startswith("!"))


def test_the_image_gets_the_code_and_nothing_else(tmp_path):
    """The files that .dockerignore lets through are enough for a run's checks; a user's data and runs stay outside."""
    assert IGNORED[0] == "*" and not any(map(in_image, ("mydata", "runs", ".venv", ".git", "my_rewards.py")))
    for path in filter(lambda path: in_image(path.name), ROOT.iterdir()):
        shutil.copytree(path, tmp_path / path.name) if path.is_dir() else shutil.copy(path, tmp_path)
    run_python("train_grpo.py", "--check", cwd=tmp_path, MODEL_ID="tiny", PYTHONPATH="")


def test_the_task_names_settings_and_files_that_exist():
    names = {*SKY["envs"], *re.findall(r"--env ([A-Z_]+)=", SKY_TEXT)}
    assert {"BUCKET", "RUN"} <= names <= {"BUCKET", "RUN"} | {name for _, name, *_ in setting_rows()}
    # BUCKET and SkyPilot's own variables must not be taken for mistyped settings.
    values = {name: value for name, value in SKY["envs"].items() if value is not None}
    assert not load_settings(values | {"BUCKET": "name", "SKYPILOT_TASK_ID": "1"})[2]
    for name in re.findall(r"(?:scripts|docs)/[\w/.-]*\w", SKY_TEXT):
        assert (ROOT / name).is_file(), name
    for part in ("setup", "run"):
        subprocess.run(["bash", "-n"], input=SKY[part], text=True, check=True)
    # SkyPilot restarts without limit, so only after an end that another start mends: 128 + SIGTERM.
    assert SKY["resources"]["use_spot"] is True
    assert SKY["resources"]["job_recovery"]["recover_on_exit_codes"] == [128 + signal.SIGTERM]


# As much of rsync as the script uses, for machines without it; $RSYNC_FAILS is a pattern of sources or targets that
# cannot be reached; $RSYNC_WAITS lets a copy of a run's folder wait for complete.json.
RSYNC = f"""#!{sys.executable}
import fnmatch, os, pathlib, shutil, sys, time
*options, source, target = sys.argv[1:]
if any(fnmatch.fnmatch(path, os.environ.get("RSYNC_FAILS", "-")) for path in (source, target)):
    sys.exit(23)
copying = source.endswith("/") and target.endswith("/bucket/first/")
while os.environ.get("RSYNC_WAITS") and copying and not os.path.exists(source + "complete.json"):
    time.sleep(0.05)
if shutil.which("rsync", path=os.environ["REAL_PATH"]):
    os.execvpe("rsync", ["rsync", *sys.argv[1:]], os.environ | {{"PATH": os.environ["REAL_PATH"]}})
risked = [option.removeprefix("--filter=R /").removesuffix("/***") for option in options if "=R /" in option]
hidden = [option.removeprefix("--filter=H /") for option in options if "=H /" in option]
deleting = "--delete-after" in options and "--filter=P *" in options
if source.endswith("/"):
    before = set(os.listdir(source)) - set(hidden)
    ignored = lambda folder, names: [name for name in names if ".tmp" in name or name in hidden]
    shutil.copytree(source, target, dirs_exist_ok=True, ignore=ignored)
    for path in pathlib.Path(target).iterdir() if deleting else ():
        if path.name not in before and any(fnmatch.fnmatch(path.name, pattern) for pattern in risked):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
else:
    shutil.copy(source, target)
"""
STEP = {"PROMPTS_PER_STEP": 1, "NUM_GENERATIONS": 2, "MAX_COMPLETION_LEN": 8, "SAVE_STEPS": 1, "SAVE_TOTAL_LIMIT": 1}


@pytest.fixture
def machine(tmp_path) -> Iterator[Callable[..., subprocess.Popen]]:
    """Starts train_and_copy.sh with the tiny model on the machine called `name`, with its own folder and one bucket for
    all, which holds files of somebody else."""
    tools = write_commands(tmp_path / "bin", {"rsync": RSYNC, "python": f'exec {sys.executable} "$@"'})
    (tmp_path / "bucket/first/notes").mkdir(parents=True)
    for name in THESIS:
        (tmp_path / "bucket/first" / name).write_text("years of work")
    processes = []

    def start(name: str, copy: str = "bucket/first", seconds: str = "0.1", **settings: object) -> subprocess.Popen:
        real_path = os.environ["PATH"]
        environ = environment(tmp_path / name / "first", **STEP | settings)
        environ |= {"PATH": f"{tools}{os.pathsep}{real_path}", "REAL_PATH": real_path}
        command = ["bash", str(CLOUD / "train_and_copy.sh"), str(tmp_path / copy), seconds]
        with (tmp_path / "output.txt").open("a") as output:
            options = {"cwd": ROOT, "env": environ, "stdout": output, "stderr": output, "start_new_session": True}
            processes.append(subprocess.Popen(command, **options))
        return processes[-1]

    yield start
    for process in processes:  # The trainer ends with the script.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


THESIS = {"thesis.txt", "notes/draft.txt"}


def files_in(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def assert_copied(tmp_path: Path, name: str) -> None:
    """The bucket holds the run of a machine, its zip, and what else was there."""
    run, copy = tmp_path / name / "first", tmp_path / "bucket/first"
    assert files_in(copy) == files_in(run) | THESIS
    assert all((copy / path).read_bytes() == (run / path).read_bytes() for path in files_in(run))
    assert (tmp_path / "bucket/first.zip").read_bytes() == run.with_name("first.zip").read_bytes()


def test_a_run_is_copied_and_the_next_machine_continues_it(machine, tmp_path):
    """Checkpoints that the run deleted are deleted in the copy, and nothing else. An older disk, that of another run
    and one whose settings.json is damaged do not replace the copy."""
    assert machine("one", TOTAL_STEPS=2).wait() == 0
    assert_copied(tmp_path, "one")
    assert machine("two", TOTAL_STEPS=3).wait() == 0
    assert_copied(tmp_path, "two")
    output = (tmp_path / "output.txt").read_text()
    # While it trains a copy may meet a file that is just being renamed, and the next one mends that. The last may not.
    assert "continuing from step 2" in output and "of 5 to" not in output
    before = {path: (tmp_path / "bucket" / path).read_bytes() for path in files_in(tmp_path / "bucket")}
    assert "first/checkpoint-3/manifest.json" in before and "first/checkpoint-2/manifest.json" not in before
    assert machine("one", TOTAL_STEPS=4).wait() == 2
    assert f"bucket/first is at step 3, {tmp_path}/one/first at step 2: move" in (tmp_path / "output.txt").read_text()
    shutil.copytree(tmp_path / "two", tmp_path / "three")
    (tmp_path / "three/first/settings.json").write_text("{")
    assert machine("three", TOTAL_STEPS=4).wait() == 2
    log = tmp_path / "three/first/metrics.csv"
    log.write_text(log.read_text().replace(":", "-"))
    assert machine("three", TOTAL_STEPS=4).wait() == 2
    assert "holds another run than" in (tmp_path / "output.txt").read_text()
    assert {path: (tmp_path / "bucket" / path).read_bytes() for path in files_in(tmp_path / "bucket")} == before


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGKILL"])
def test_a_notice_reaches_the_run_once_and_the_last_copy_does_not_wait(machine, tmp_path, name):
    """Ctrl-C goes to all processes of the terminal. Where the script is killed, the run saves a checkpoint too."""
    process = machine("one", seconds="900", TOTAL_STEPS=9, SAVE_STEPS=9, HOLD_AT=2)
    run = tmp_path / "one/first"
    wait_until((tmp_path / "one/held").exists, process)
    if name == "SIGINT":
        os.killpg(process.pid, signal.SIGINT)
    else:
        process.send_signal(signal.Signals[name])
    wait_until(lambda: has_line(run))
    go_on(run)
    assert process.wait() == (-9 if name == "SIGKILL" else 143)
    if name == "SIGKILL":
        wait_until(lambda: has_line(run, "interrupted at step 2"))
    else:
        assert_copied(tmp_path, "one")
    assert not checkpoint_fault(run / "checkpoint-2") and "stopped at once" not in (run / "training.log").read_text()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"seconds": "x"}, "SECONDS=x: give a number above 0"),
        ({"seconds": "0.0"}, "SECONDS=0.0: give a number above 0"),
        ({"copy": "one/first/copy"}, "lies in OUTPUT_DIR"),
        ({"copy": "one/first"}, "lies in OUTPUT_DIR"),
        ({"copy": "/"}, "is the root of a disk or bucket"),
        ({"copy": "/proc"}, "is the root of a disk or bucket"),
        ({"OVERWRITE": "1"}, "OVERWRITE=1 would begin again on every machine"),
        ({"copy": "adapter"}, "adapter holds README.md and no run"),
    ],
)
def test_what_is_refused(machine, tmp_path, options, words):
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter/README.md").write_text("mine")
    assert machine("one", **options).wait() == 2
    assert words in (tmp_path / "output.txt").read_text() and not (tmp_path / "one/first").exists()
    assert files_in(tmp_path / "adapter") == {"README.md"}


def test_a_copy_that_cannot_be_read_is_no_start_and_a_last_copy_that_fails_no_success(machine, tmp_path):
    """A fresh run would overwrite the copy. With exit code 0 the machine would be given back, and the result lost with
    it: the same command then makes the last copy, although the trainer refuses the complete run."""
    assert machine("one", RSYNC_FAILS="*/bucket/first/").wait() == 2 and not (tmp_path / "one/first").exists()
    assert f"{tmp_path}/bucket/first cannot be read" in (tmp_path / "output.txt").read_text()
    (tmp_path / "one/first").mkdir(parents=True)
    (tmp_path / "one/first/thesis.txt").touch()
    # A copy that was cut off before its settings.json is no run.
    (tmp_path / "bucket/first/checkpoint-7").mkdir()
    (tmp_path / "two/first").mkdir(parents=True)
    # Its first copy begins before there is a zip, and ends after the run: complete.json must not come without the zip.
    assert machine("two", TOTAL_STEPS=1, RSYNC_FAILS="*first.zip", RSYNC_WAITS=1).wait() == 1
    assert (tmp_path / "output.txt").read_text().count("copy 5 of 5") == 1
    assert not any((tmp_path / "bucket" / name).exists() for name in ("first.zip", "first/complete.json"))
    assert machine("two", TOTAL_STEPS=1).wait() == 2
    assert_copied(tmp_path, "two")
    # Files of somebody else in OUTPUT_DIR are not this script's to delete.
    assert machine("one").wait() == 2 and files_in(tmp_path / "one/first") == {"thesis.txt"}
