# SPDX-License-Identifier: Apache-2.0
"""scripts/slurm/train.sbatch on two nodes that are folders' worth of processes here: Slurm's commands are stand-ins."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT
from runs import environment, go_on, has_line, wait_until

from grpo.run.folder import find_checkpoint
from grpo.run.layout import EXIT

# srun starts its command once a node; scancel signals every process of the step, as slurmd does.
COMMANDS = {
    "srun": 'echo $$ > "$STEP"; for n in $(seq 0 $((SLURM_NNODES - 1))); do SLURM_NODEID=$n "$@" & done; '
    "code=0; for job in $(jobs -p); do wait $job || code=1; done; exit $code",
    "scontrol": '[ "$1" = show ] && echo localhost || echo "$*" >> "$STEP.asked"',
    "squeue": 'cat "$STEP.state"',
    "scancel": "below() { for pid in $(pgrep -P $1); do echo $pid; below $pid; done; }; "
    'kill -TERM $(below "$(cat "$STEP")")',
}


def commands(tools: Path) -> Path:
    tools.mkdir()
    for name, text in COMMANDS.items():
        (tools / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (tools / name).chmod(0o755)
    return tools


def start(folder: Path, tools: Path, **settings: object) -> subprocess.Popen:
    job = {"SLURM_NNODES": 2, "SLURM_JOB_ID": os.getpid(), "SLURM_JOB_NODELIST": "two"}
    environ = environment(folder, **job | settings)
    environ |= {"PATH": f"{tools}:{Path(sys.executable).parent}:{os.environ['PATH']}", "STEP": str(tools / "step")}
    command = ["bash", "scripts/slurm/train.sbatch"]
    return subprocess.Popen(command, env=environ, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


@pytest.mark.slow
@pytest.mark.parametrize(("nodes", "state"), [(2, "RUNNING"), (1, "COMPLETING")])
def test_a_job_that_has_to_go_saves_its_step_and_is_queued_again_unless_its_user_cancelled_it(tmp_path, nodes, state):
    """Slurm says of a cancelled job at once that it is completing."""
    folder, tools = tmp_path / "run", commands(tmp_path / "bin")
    (tools / "step.state").write_text(f"{state}\n")
    job = start(folder, tools, SLURM_NNODES=nodes, HOLD_AT=3)
    wait_until(folder.with_name("held").exists, job)
    if state == "RUNNING":
        job.send_signal(signal.SIGUSR1)
    else:
        subprocess.run([tools / "scancel"], env=os.environ | {"STEP": str(tools / "step")}, check=True)
    wait_until(lambda: has_line(folder), job)
    go_on(folder)
    output = job.communicate()[0]
    assert job.returncode and json.loads((folder / EXIT).read_text())["code"] == 143, output
    assert find_checkpoint(folder)[0] == 3 and output.count("\nThis run\n") == 1
    assert ("on 2 machines" in output) is (nodes == 2)
    requeued = (tools / "step.asked").read_text() if (tools / "step.asked").exists() else ""
    assert requeued == (f"requeue {os.getpid()}\n" if state == "RUNNING" else "")
