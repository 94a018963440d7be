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

import pytest
import yaml
from conftest import CLEAN, ROOT, run_python, write_commands
from runs import wait_until

from grpo.settings import load_settings, setting_rows

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


# As much of rsync as the script uses; $RSYNC_FAILS is a pattern of sources or targets that cannot be reached.
RSYNC = f"""#!{sys.executable}
import fnmatch, os, pathlib, shutil, sys
*options, source, target = sys.argv[1:]
if any(fnmatch.fnmatch(path, os.environ.get("RSYNC_FAILS", "-")) for path in (source, target)):
    sys.exit(23)
if source.endswith("/"):
    shutil.copytree(source, target, dirs_exist_ok=True)
    kept = {{path.relative_to(source) for path in pathlib.Path(source).rglob("*")}}
    for path in sorted(pathlib.Path(target).rglob("*"), reverse=True) if "--delete-after" in options else ():
        if path.relative_to(target) not in kept:
            path.rmdir() if path.is_dir() else path.unlink()
else:
    shutil.copy(source, target)
"""
# In the place of the trainer: one step more than the last checkpoint, which replaces it, then the zip.
TRAINER = """
trap 'exit 143' TERM
[ "${REFUSES:-}" != 1 ] || exit 2
step=$(ls -d "$OUTPUT_DIR"/checkpoint-* 2>/dev/null | sed 's/.*-//') || step=0
mkdir -p "$OUTPUT_DIR/checkpoint-$((step + 1))"
[ "$step" = 0 ] || rmdir "$OUTPUT_DIR/checkpoint-$step"
echo "$step" >"$OUTPUT_DIR/settings.json"
while [ "${WAITS:-}" = 1 ]; do sleep 0.1; done
echo "$((step + 1))" >"$OUTPUT_DIR.zip"
exit "${CODE:-0}"
"""


@pytest.fixture
def machine(tmp_path) -> Iterator[Callable[..., subprocess.Popen]]:
    """Starts train_and_copy.sh on the machine called `name`, with its own folder and one bucket for all."""
    tools = write_commands(tmp_path / "bin", {"rsync": RSYNC, "python": TRAINER})
    (tmp_path / "bucket").mkdir()
    processes = []

    def start(name: str, **environ: str) -> subprocess.Popen:
        (tmp_path / name).mkdir(exist_ok=True)
        path = f"{tools}{os.pathsep}{os.environ['PATH']}"
        environ = CLEAN | {"PATH": path, "OUTPUT_DIR": "runs/first"} | environ
        command = ["bash", str(CLOUD / "train_and_copy.sh"), str(tmp_path / "bucket/first"), "0.1"]
        with (tmp_path / "errors.txt").open("a") as errors:
            options = {"cwd": tmp_path / name, "env": environ, "stderr": errors, "start_new_session": True}
            processes.append(subprocess.Popen(command, **options))
        return processes[-1]

    yield start
    for process in processes:  # A trainer that the script left behind would wait for ever.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def files_in(folder) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*")}


def run_of(step: int) -> set[str]:
    return {"first", "first/settings.json", f"first/checkpoint-{step}", "first.zip"}


def test_a_run_is_copied_and_the_next_machine_continues_it(machine, tmp_path):
    """The exit code is the run's; files that the run deleted are deleted in the copy, and the zip is the newer one."""
    bucket = tmp_path / "bucket"
    assert machine("one").wait() == 0 and files_in(bucket) == run_of(1)
    assert machine("two", CODE="4").wait() == 4 and files_in(bucket) == run_of(2) == files_in(tmp_path / "two/runs")
    assert (bucket / "first.zip").read_text() == "2\n"
    # A machine that has the run does not take the copy.
    shutil.rmtree(bucket / "first/checkpoint-2")
    assert machine("two").wait() == 0 and files_in(bucket) == run_of(3)


def test_a_copy_that_was_cut_off_before_its_settings_is_no_run(machine, tmp_path):
    """The trainer would refuse such a folder. An empty OUTPUT_DIR does not matter."""
    (tmp_path / "bucket/first/checkpoint-7").mkdir(parents=True)
    (tmp_path / "one/runs/first").mkdir(parents=True)
    assert machine("one").wait() == 0
    assert files_in(tmp_path / "one/runs") == run_of(1)


@pytest.mark.parametrize(("environ", "code"), [({"RSYNC_FAILS": "*/bucket/first/"}, 23), ({"REFUSES": "1"}, 2)])
def test_a_copy_is_never_replaced_by_less(machine, tmp_path, environ, code):
    """Neither where the copy cannot be read, nor where the run is refused."""
    assert machine("one").wait() == 0
    before = files_in(tmp_path / "bucket")
    assert machine("two", **environ).wait() == code and files_in(tmp_path / "bucket") == before
    # Files of somebody else in OUTPUT_DIR stop the copy, too.
    (tmp_path / "three/runs/first").mkdir(parents=True)
    (tmp_path / "three/runs/first/thesis.txt").touch()
    assert machine("three").wait() == 1 and files_in(tmp_path / "three/runs/first") == {"thesis.txt"}


def test_a_last_copy_that_fails_is_no_success(machine, tmp_path):
    """With exit code 0 the machine would be given back, and the result lost with it."""
    assert machine("one", RSYNC_FAILS="*first.zip").wait() == 1
    assert (tmp_path / "errors.txt").read_text().count("copy 5 of 5") == 1


def test_a_signal_reaches_the_run(machine, tmp_path):
    process = machine("one", WAITS="1")
    wait_until((tmp_path / "bucket/first/settings.json").is_file, process)  # It is copied while the run trains.
    process.terminate()
    assert process.wait() == 143
