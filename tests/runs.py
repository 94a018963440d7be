# SPDX-License-Identifier: Apache-2.0
"""Runs of the entry point as a user starts them, and their results."""

import contextlib
import importlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import pytest
from helpers import CLEAN, ROOT, SCRIPT, quietly, read_csv, write_csv
from reliability import content

import train_grpo
from grpo.output.layout import ADAPTER
from grpo.settings.table import FIELDS
from grpo.tasks.tes.plant import PLANT

SETTINGS = {
    "MODEL_ID": "tiny", "TOTAL_STEPS": 6, "SAVE_STEPS": 2, "PROMPTS_PER_STEP": 3, "NUM_GENERATIONS": 4, "SEED": 5,
    "EVAL_SAMPLES": 0, "TEMPERATURE": 1, "DATA": "data/tes_heldout_compact.csv", "REWARDS": "action,paused:hold",
    # Four rows without a plant: the closed loop would take minutes.
    "EVAL_DATA": ROOT / "tests/process/fixtures/rows.csv",
    "PYTHONPATH": str(ROOT / "tests"),
}  # fmt: skip

ASKED = "a second signal ends the run at once"


def plant_inputs(folder: Path, windows: int = 1) -> dict[str, Path]:
    """Settings of a short evaluation: twelve held-out rows of the plant, and the first windows of its held-out days."""
    lengths, paths = {"tes_heldout_compact.csv": 1 + 12, "profile_heldout.csv": 1 + 96 * windows}, []
    for name, length in lengths.items():
        paths.append(folder / name)
        paths[-1].write_text("".join((ROOT / "data" / name).read_text().splitlines(True)[:length]))
    coarsen(paths[-1])
    return dict(zip(("EVAL_DATA", "EVAL_PROFILE"), paths, strict=True))


def coarsen(profile: Path) -> None:
    """Makes every load in the file a multiple of the plant's smallest output: its storage then takes few energies, and
    an exact closed loop asks a tenth of the prompts."""
    rows, step = read_csv(profile), PLANT.outputs_kw[1]
    for row in rows:
        row["load_kw"] = str(round(float(row["load_kw"]) / step) * step)
    write_csv(profile, list(rows[0]), [list(row.values()) for row in rows])


def environment(folder: Path, **settings: object) -> dict[str, str]:
    return CLEAN | {name: str(value) for name, value in (SETTINGS | {"OUTPUT_DIR": folder} | settings).items()}


@contextlib.contextmanager
def only_settings(**variables: object) -> Iterator[None]:
    """What runs in this process gets these variables and no other settings, and leaves no trace in the process."""
    with quietly(), pytest.MonkeyPatch.context() as patch:
        for name in os.environ.keys() & FIELDS.keys():
            patch.delenv(name)
        for name, value in (CLEAN | variables).items():
            patch.setenv(name, str(value))
        yield


def run_here(code: int = 0, **variables: object) -> str:
    """A run in this process, which must end with this exit code: its training.log. One of its own would take seconds
    for its imports. Runs that are compared bit by bit need one: sums may depend on where memory lies."""
    with only_settings(**variables):
        assert train_grpo.main([]) == code
    return Path(str(variables["OUTPUT_DIR"]), "training.log").read_text(encoding="utf-8")


def child_here(command: Sequence[object], environ: Mapping[str, str] = MappingProxyType({})) -> int:
    """In the place of `run_child`: the program's `main` in this process, with the environment that it would have."""
    _, program, *arguments = map(str, command)
    with only_settings(**os.environ | environ):
        return importlib.import_module(Path(program).stem).main(arguments)


def start_held(
    folder: Path, step: int, *before: str, program: Sequence[str] = (sys.executable, str(SCRIPT)), **settings: object
) -> subprocess.Popen:
    """A run that has done `step` steps, saved its files after them, and waits in the next one (see paused.py).

    before: words in front of `program` on its command line."""
    command, environ = [*before, *program], environment(folder, HOLD_AT=step + 1, **settings)
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    process = subprocess.Popen(command, env=environ, cwd=ROOT, text=True, **streams)
    wait_until(folder.with_name("held").exists, process)
    return process


def go_on(folder: Path) -> None:
    folder.with_name("go").touch()


def finish(process: subprocess.Popen) -> str:
    """The output of a run, once it has ended."""
    return process.communicate()[0]


def has_line(folder: Path, words: str = ASKED) -> bool:
    """Whether the run's training.log contains these words."""
    return words in (folder / "training.log").read_text(encoding="utf-8")


def wait_until(condition: Callable[[], bool], process: subprocess.Popen | None = None) -> None:
    """Waits as long as the process lives; pytest's own limit ends an endless wait."""
    while not condition():
        assert process is None or process.poll() is None or condition(), process.communicate()[0]
        time.sleep(0.02)


def assert_same_run(folder: Path, whole: Path) -> None:
    """Both runs have the same rows, but for columns that measure time, and the same adapter, bit for bit."""
    for name in ("completions.csv", "metrics.csv", ADAPTER):
        assert content(folder / name, folder) == content(whole / name, whole), name
