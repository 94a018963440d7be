# SPDX-License-Identifier: Apache-2.0
"""Faults in each phase of a step beside vLLM: kills, memory that is gone, a dying engine; and whether the same command goes
on."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pandas

from grpo.learn import trainer as learner
from grpo.learn.trainer import Trainer
from grpo.measure.forks import fresh_folder
from grpo.measure.record import BENCH, NOISE, SCRIPT, figure, shown, write
from grpo.measure.watched import intercept, occupy
from grpo.rollout.engine import Engine
from grpo.run.folder import last_checkpoint

# Phase -> whose function it is, and seconds into it at which a kill comes: before its end on an H200,
# also with the mid-size model (wake 0.023 s, sleep 0.006 s).
PHASES = {
    "wake": (Engine, "wake", 0.01), "sync": (Engine, "sync_weights", 0.005), "generate": (Engine, "generate", 0.2),
    "sleep": (Engine, "sleep", 0.003), "learn": (Trainer, "learn", 0.1), "save": (learner, "finish_checkpoint", 0.0),
}  # fmt: skip
# What happens on a GPU: sleep and save take none of its memory, and only generating can die of the engine.
FAULTS = (
    *(f"kill:{phase}" for phase in PHASES),
    *(f"memory:{phase}" for phase in ("wake", "sync", "generate", "learn")),
    "dying:generate",
)
SAVE_EVERY, COMPLETIONS = 2, 16
CRITICAL = " C train_grpo: "  # in a line of training.log
# How -> the exit codes that it may come to, and what the run's last words, those that it logs as critical, then hold.
EXPECTED = {"kill": ((-signal.SIGKILL,), ""), "memory": ((1, 4), "memory"), "dying": ((4,), "EngineCore died")}
SPARE_GIB = 1 / 32  # that a full GPU has left


class Fault:
    """`how:phase`, that comes once the learner has begun its step `step`."""

    def __init__(self, fault: str, step: int):
        self.how, self.phase = fault.split(":")
        self.step, self.armed, self.filling = step, False, None

    def learn(self, learn: Callable[..., Any], trainer: Trainer, *given: Any) -> Any:
        self.armed = self.armed or trainer.state.global_step + 1 >= self.step
        return self.strike(learn, trainer, *given) if self.phase == "learn" else learn(trainer, *given)

    def strike(self, real: Callable[..., Any], *given: Any, **named: Any) -> Any:
        if self.armed and self.filling is None:
            self.filling = ()
            if self.how == "kill":
                threading.Timer(PHASES[self.phase][2], os.kill, (os.getpid(), signal.SIGKILL)).start()
            elif self.how == "memory":
                self.filling = occupy(SPARE_GIB)
            elif self.how == "dying":
                given[0].llm.generate = lambda *_, **__: (_ for _ in ()).throw(RuntimeError("EngineCore died"))
        return real(*given, **named)


def faults_child(options: argparse.Namespace) -> int:
    """The entry point with one fault, `--child how:phase:step`."""
    how, phase, step = options.child.split(":")
    fault = Fault(f"{how}:{phase}", int(step))
    with ExitStack() as stack:
        stack.enter_context(intercept(Trainer, "learn", fault.learn))
        if phase != "learn":
            stack.enter_context(intercept(*PHASES[phase][:2], fault.strike))
        return options.main([])


def run(options: argparse.Namespace, folder: Path, steps: int, fault: str = "") -> dict[str, Any]:
    """One start of the command in `folder`, with a fault or to its end: exit code, seconds, last words,
    last checkpoint."""
    settings = {
        "MODEL_ID": options.model, "DATA": options.data, "OUTPUT_DIR": folder.absolute(), "USE_VLLM": 1, "PARITY": "off",
        "EVAL_SAMPLES": 0, "REWARDS": f"action,{NOISE}", "INVALID_REWARD": 0, "PROMPTS_PER_STEP": COMPLETIONS // 8, "NUM_GENERATIONS": 8,
        "MAX_COMPLETION_LEN": 128, "TOTAL_STEPS": steps, "SAVE_STEPS": SAVE_EVERY,
    } | dict(options.set)  # fmt: skip
    child = ["faults", "--out", "-", "--model", options.model, "--data", options.data, "--child", fault]
    command = [sys.executable, *([str(BENCH), *child] if fault else [str(SCRIPT)])]
    started, log = time.perf_counter(), folder.with_name(f"{folder.name}.log")
    with log.open("a") as out:
        before = out.tell()
        environment = os.environ | {name: str(value) for name, value in settings.items()}
        code = subprocess.run(command, env=environment, stdout=out, stderr=out, check=False).returncode
    lines = [line for line in log.read_bytes()[before:].decode(errors="replace").splitlines() if line.strip()]
    said = [line.partition(CRITICAL)[2] for line in lines if CRITICAL in line] or lines[-1:]
    kept = last_checkpoint(folder)[1]
    found = {"code": code, "seconds": time.perf_counter() - started, "line": " | ".join(said)[:500]}
    found["checkpoint"] = kept.name if kept else "-"
    print(f"{fault or 'no fault'}: exit code {code}, {found['checkpoint']}, {found['seconds']:.0f} s | {found['line']}", flush=True)  # fmt: skip
    return found


def was_seen(fault: str, found: dict[str, Any]) -> bool:
    """Whether a start ended as its fault makes it end, not of something else."""
    codes, words = EXPECTED[fault.partition(":")[0]]
    return found["code"] in codes and words in found["line"]


def same_rows(folder: Path, whole: Path, steps: int) -> dict[str, Any]:
    """Whether a run that was interrupted has what one in a piece has, and how many completions are the same (vLLM's kernels
    do not give the same bits in every process)."""
    metrics, completions = (pandas.read_csv(folder / name) for name in ("metrics.csv", "completions.csv"))
    theirs = pandas.read_csv(whole / "completions.csv")
    whole_rows = metrics.step.tolist() == list(range(1, steps + 1)) and len(completions) == steps * COMPLETIONS
    archive = zipfile.ZipFile(folder.with_name(f"{folder.name}.zip")).testzip() is None
    paired = len(completions) == len(theirs)
    prompts = paired and (completions.prompt_id == theirs.prompt_id).all()
    alike = (completions.completion == theirs.completion).sum() if paired else 0
    return {"whole": bool(whole_rows and archive and prompts), "alike": int(alike), "of": len(theirs)}


def bench_faults(options: argparse.Namespace) -> int:
    """A run without a fault, and one that meets each fault of `--faults`, two steps apart, and is started again after each.
    Exit code 1 where a fault went by unseen or a start ended of something else, the same command did not go on, a step is
    missing or doubled, or a .tmp is left."""
    if options.child:
        return faults_child(options)
    faults = options.faults or FAULTS
    if strange := [fault for fault in faults if fault not in FAULTS]:
        print(f"no such fault: {', '.join(strange)}. There are: {', '.join(FAULTS)}", file=sys.stderr)
        return 2
    try:
        folder = fresh_folder(Path(options.run))
    except FileExistsError as error:
        print(error, file=sys.stderr)
        return 2
    steps, made, bad = SAVE_EVERY * (len(faults) + 1), [], 0
    whole = run(options, folder / "whole", steps)
    made.append(figure("whole_s", whole["seconds"], "s", f"{steps} steps without a fault, exit code {whole['code']}"))
    for n, fault in enumerate(faults):
        # The step before a checkpoint, so that it is saved, or lost with the kill, next.
        found = run(options, folder / "faults", steps, f"{fault}:{SAVE_EVERY * (n + 1)}")
        stopped = was_seen(fault, found)
        bad += not stopped
        note = f"exit code {found['code']}, then at {found['checkpoint']}: {found['line'][:120]}"
        made.append(figure(fault.replace(":", "_at_"), int(stopped), "seen", note))
    last = run(options, folder / "faults", steps)
    same = same_rows(folder / "faults", folder / "whole", steps)
    stray = [path.name for path in folder.rglob("*.tmp")]
    bad += last["code"] != 0 or whole["code"] != 0 or not same["whole"] or bool(stray)
    made.append(
        figure("faults", len(faults), "faults", "of one run, one after the other, each followed by the same command")
    )
    made.append(figure("completed", int(last["code"] == 0), "run", f"exit code {last['code']} of the last start"))
    made.append(figure("rows_whole", int(same["whole"]), "run", "every step once, every completion, a sound zip"))
    made.append(figure("stray", len(stray), "files", ", ".join(stray) or "no .tmp is left"))
    made.append(
        figure("completions_alike", same["alike"], "completions", f"of {same['of']}, as in the run without a fault")
    )
    flags = [word for pair in options.set for word in ("--set", "=".join(pair))]
    write(Path(options.out), made, shown("faults", *flags, "--faults", *faults))
    return int(bool(bad))
