# SPDX-License-Identifier: Apache-2.0
"""Strikes a run beside vLLM in each phase of a step (kill, full GPU, dying engine), and checks that it continues."""

import argparse
import os
import signal
import sys
import threading
import time
import zipfile
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

import pandas

from grpo.learn import trainer as learner
from grpo.learn.trainer import Trainer
from grpo.process.child import run_child
from grpo.rollout.engine import Engine
from scripts.dev.harness import Function, intercept, occupy
from scripts.dev.record import BENCH, NOISE, TRAIN_SCRIPT, figure, fresh_folder, split_settings, write

# Phase -> its function, and the seconds from its start to a kill. On an H200 the kill comes before the phase ends, even
# with the mid-size model (wake takes 0.023 s, sleep 0.006 s).
PHASES: dict[str, tuple[type | ModuleType, str, float]] = {
    "wake": (Engine, "wake", 0.01),
    "sync": (Engine, "sync_weights", 0.005),
    "generate": (Engine, "generate", 0.2),
    "sleep": (Engine, "sleep", 0.003),
    "learn": (Trainer, "learn", 0.1),
    "save": (learner, "finish_checkpoint", 0.0),
}
# Full memory does not stop sleep and save, which take none of the GPU's, and an engine dies only while it generates.
FAULTS = (
    *(f"kill:{phase}" for phase in PHASES),
    *(f"memory:{phase}" for phase in ("wake", "sync", "generate", "learn")),
    "dying:generate",
)
SAVE_EVERY = 2  # steps
COMMON = f"""USE_VLLM=1 PARITY=off EVAL_SAMPLES=0 REWARDS=action,{NOISE} INVALID_REWARD=0 NUM_GENERATIONS=8
    PROMPTS_PER_STEP=2 MAX_COMPLETION_LEN=128 SAVE_STEPS={SAVE_EVERY}"""
CRITICAL = " C train_grpo: "  # Marks critical lines of training.log.
# Kind of fault -> exit codes that it may end with, and words that the run's critical lines then hold.
EXPECTED = {"kill": ((128 + signal.SIGKILL,), ""), "memory": ((1, 4), "memory"), "dying": ((4,), "EngineCore died")}
SPARE_GIB = 1 / 32  # What is free on a GPU that counts as full.


class Start(NamedTuple):
    """How one start of the command ended."""

    code: int
    seconds: float
    message: str  # the log's critical lines, or its last line where there are none

    def shows(self, fault: str) -> bool:
        """Whether this start ended by the exit code and the message that `fault` causes."""
        codes, words = EXPECTED[fault.partition(":")[0]]
        return self.code in codes and words in self.message


def faults_child(options: argparse.Namespace) -> int:
    """The entry point with the fault `--child kind:phase:step`: it comes in the phase's first call after the learner
    has begun that step."""
    kind, phase, step = options.child.split(":")
    owner, name, delay = PHASES[phase]
    is_armed, ballast = False, []

    def arm(learn: Function, trainer: Trainer, *arguments: Any) -> Any:
        nonlocal is_armed
        is_armed |= trainer.state.global_step + 1 == int(step)
        return learn(trainer, *arguments)

    def strike(call: Function, *arguments: Any, **named: Any) -> Any:
        nonlocal is_armed
        if is_armed:
            is_armed = False
            if kind == "kill":
                threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL)).start()
            elif kind == "memory":
                ballast.append(occupy(SPARE_GIB))
            else:
                arguments[0].llm.generate = mock.Mock(side_effect=RuntimeError("EngineCore died"))
        return call(*arguments, **named)

    with ExitStack() as stack:
        stack.enter_context(intercept(owner, name, strike))
        stack.enter_context(intercept(Trainer, "learn", arm))  # `arm` runs before `strike` where both watch learning.
        return options.main([])


def start_run(options: argparse.Namespace, folder: Path, steps: int, fault: str = "") -> Start:
    """Starts the command in `folder`, with a fault or to its end."""
    paths = {"MODEL_ID": options.model, "DATA": options.data, "OUTPUT_DIR": str(folder.absolute())}
    settings = {**split_settings(COMMON), **paths, "TOTAL_STEPS": str(steps), **dict(options.set)}
    command = [sys.executable, str(TRAIN_SCRIPT)]
    if fault:
        words = ["faults", "--out", "-", "--model", options.model, "--data", options.data, "--child", fault]
        command = [sys.executable, str(BENCH), *words]
    started, log_path = time.perf_counter(), folder.with_name(f"{folder.name}.log")
    with log_path.open("a") as output:
        size_before = output.tell()
        code = run_child(command, settings, output)
    lines = log_path.read_bytes()[size_before:].decode(errors="replace").splitlines()
    message = " | ".join([line.partition(CRITICAL)[2] for line in lines if CRITICAL in line] or lines[-1:])
    start = Start(code, time.perf_counter() - started, message)
    print(f"{fault or 'no fault'}: exit code {code}, {start.seconds:.0f} s. {message}", flush=True)
    return start


def is_complete(folder: Path, uninterrupted: Path, steps: int) -> bool:
    """Whether a run that was interrupted has every step once, the same prompts' completions as the uninterrupted
    one, and a sound zip. Texts are not compared, as vLLM's kernels do not give the same bits in every process."""
    metrics, completions = (pandas.read_csv(folder / name) for name in ("metrics.csv", "completions.csv"))
    expected = pandas.read_csv(uninterrupted / "completions.csv")
    return (
        metrics.step.tolist() == list(range(1, steps + 1))
        and completions.prompt_id.tolist() == expected.prompt_id.tolist()
        and zipfile.ZipFile(folder.with_name(f"{folder.name}.zip")).testzip() is None
    )


def bench_faults(options: argparse.Namespace) -> int:
    """A run without a fault, and one that meets each fault of `--faults`, two steps apart, and is started again after
    each. Returns 1 if a fault went by unseen or a start ended for another reason, the same command did not continue, a
    step is missing or doubled, or a .tmp file is left."""
    if options.child:
        return faults_child(options)
    folder, faults = fresh_folder(Path(options.run)), options.faults or FAULTS
    steps = SAVE_EVERY * (len(faults) + 1)
    whole = start_run(options, folder / "whole", steps)
    figures = [figure("whole_s", whole.seconds, "s", f"{steps} steps without a fault, exit code {whole.code}")]
    all_seen = True
    for number, fault in enumerate(faults, 1):
        # The fault is armed in a step that ends with a checkpoint, which is saved next, or lost with the kill.
        start = start_run(options, folder / "faults", steps, f"{fault}:{SAVE_EVERY * number}")
        all_seen &= start.shows(fault)
        note = f"exit code {start.code}: {start.message[:120]}"
        figures.append(figure(fault.replace(":", "_at_"), int(start.shows(fault)), "seen", note))
    last = start_run(options, folder / "faults", steps)
    has_all_rows = is_complete(folder / "faults", folder / "whole", steps)
    stray = [path.name for path in folder.rglob("*.tmp")]
    figures += [
        figure("completed", int(last.code == 0), "run", f"exit code {last.code} of the last start"),
        figure("rows_whole", int(has_all_rows), "run", "every step once, every completion, a sound zip"),
        figure("stray", len(stray), "files", ", ".join(stray) or "no .tmp is left"),
    ]
    write(Path(options.out), figures)
    return int(not (all_seen and has_all_rows) or bool(last.code or whole.code or stray))
