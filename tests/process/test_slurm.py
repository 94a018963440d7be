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
from helpers import write_commands
from runs import finish, go_on, has_line, start_held, wait_until

from grpo.output.checkpoints import find_checkpoint
from grpo.output.layout import EXIT

# srun starts its command once a node; scancel signals every process of the step, as slurmd does.
COMMANDS = {
    "srun": 'echo $$ > "$STEP"; for n in $(seq 0 $((SLURM_NNODES - 1))); do SLURM_NODEID=$n "$@" & done; '
    "code=0; for job in $(jobs -p); do wait $job || code=1; done; exit $code",
    "scontrol": '[ "$1" = show ] && echo localhost || echo "$*" >> "$STEP.asked"',
    "squeue": 'cat "$STEP.state"',
    "scancel": "below() { for pid in $(pgrep -P $1); do echo $pid; below $pid; done; }; "
    'kill -TERM $(below "$(cat "$STEP")")',
}


@pytest.mark.slow
@pytest.mark.parametrize(("nodes", "state"), [(2, "RUNNING"), (1, "COMPLETING")])
def test_a_job_that_has_to_go_saves_its_step_and_is_queued_again_unless_its_user_cancelled_it(tmp_path, nodes, state):
    """Slurm says of a cancelled job at once that it is completing."""
    folder, tools = tmp_path / "run", write_commands(tmp_path / "bin", COMMANDS)
    (tools / "step.state").write_text(f"{state}\n")
    settings = {"SLURM_NNODES": nodes, "SLURM_JOB_ID": os.getpid(), "SLURM_JOB_NODELIST": "two", "STEP": tools / "step"}
    settings["PATH"] = f"{tools}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    job = start_held(folder, 2, program=["bash", "scripts/slurm/train.sbatch"], **settings)
    if state == "RUNNING":
        job.send_signal(signal.SIGUSR1)
    else:
        subprocess.run([tools / "scancel"], env=os.environ | {"STEP": str(tools / "step")}, check=True)
    wait_until(lambda: has_line(folder), job)
    go_on(folder)
    output = finish(job)
    assert job.returncode and json.loads((folder / EXIT).read_text())["code"] == 143, output
    assert find_checkpoint(folder)[0] == 3 and output.count("\nThis run\n") == 1
    assert ("on 2 machines" in output) is (nodes == 2)
    requeued = (tools / "step.asked").read_text() if (tools / "step.asked").exists() else ""
    assert requeued == (f"requeue {os.getpid()}\n" if state == "RUNNING" else "")
