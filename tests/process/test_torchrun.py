# SPDX-License-Identifier: Apache-2.0
"""torchrun starts the entry point: two processes leave what one leaves, stop together, and continue as any number."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from helpers import CLEAN, ROOT, SCRIPT, read_csv, run_python, run_script
from runs import ASKED, SETTINGS, environment, finish, go_on, has_line, start_held, wait_until
from safetensors.torch import load_file

from grpo.output.checkpoints import find_checkpoint
from grpo.output.durable import read_sealed
from grpo.output.layout import ADAPTER, EXIT

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2")
# With TOP_P below 1 an evaluation is sampled, not exact; a rate that does not know TOTAL_STEPS.
EVALUATED = {"EVAL_SAMPLES": 2, "EVAL_STEPS": 3, "TOP_P": 0.95, "LR_SCHEDULER": "constant"}
# The same completions for any number of processes, and none of their groups cut in two by a batch.
EVALUATED |= {"REWARDS": "action,paused:hold,fixed:nothing", "PROMPTS_PER_STEP": 4, "NUM_GENERATIONS": 3}


def torchrun(code: int = 0, **settings: object) -> subprocess.CompletedProcess:
    return run_python(*TORCHRUN[1:], SCRIPT, code=code, **environment(**settings))


def weights(folder: Path) -> torch.Tensor:
    """Every lora_B, which starts at 0: all of it was learned."""
    return torch.cat([tensor.flatten() for name, tensor in load_file(folder / ADAPTER).items() if "lora_B" in name])


def read_exit(folder: Path) -> tuple[int, str]:
    """Exit code and reason, as exit.json says it and so does the last line of training.log."""
    record = json.loads((folder / EXIT).read_text(encoding="utf-8"))
    last = (folder / "training.log").read_text(encoding="utf-8").splitlines()[-1]
    assert last.endswith(f" exit code {record['code']}: {record['reason']}"), last
    return record["code"], record["reason"]


def assert_alike(folder: Path, whole: Path) -> None:
    """The same completions, evaluations and best step, and an adapter that differs by rounding only."""
    assert (folder / "completions.csv").read_bytes() == (whole / "completions.csv").read_bytes()
    difference = (weights(folder) - weights(whole)).norm() / weights(whole).norm()
    assert difference < 1e-4  # 8e-6 here: Adam divides by small numbers, step after step
    ours, theirs = (read_sealed(path / "evaluation.json")["after"] for path in (folder, whole))
    assert ours["reward"] == pytest.approx(theirs["reward"]) and ours["tokens_mean"] == theirs["tokens_mean"]
    assert read_sealed(folder / "best" / "best.json")["step"] == read_sealed(whole / "best" / "best.json")["step"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """Six steps of one process."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    run_script(**SETTINGS | EVALUATED | {"OUTPUT_DIR": folder})
    assert not (folder / EXIT).exists()
    return folder


def test_a_sigterm_in_a_long_step_saves_it_and_any_number_continues(whole, tmp_path):
    """By scripts/torchrun.sh, as torchrun gives no step more than 30 s; twice, as Slurm sends it to every process. Its
    PATH is that of an image without procps. Then one process goes on, and two after that."""
    folder, programs = tmp_path / "run", tmp_path / "bin"
    programs.mkdir()
    for name in ("bash", "cat", "dirname", "sleep"):
        (programs / name).symlink_to(str(shutil.which(name)))
    path = f"{Path(sys.executable).parent}:{programs}"
    command = "exec bash scripts/torchrun.sh --nproc-per-node 2"
    process = start_held(folder, 2, "bash", "-c", command, PATH=path, **EVALUATED)
    for _ in range(2):
        process.send_signal(signal.SIGTERM)
        time.sleep(0.5)
    wait_until(lambda: has_line(folder), process)
    assert not (folder / "checkpoint-3").exists()
    go_on(folder)
    output = finish(process)
    code, reason = read_exit(folder)
    assert process.returncode and code == 143 and "interrupted at step 3; the same command continues" in reason, output
    assert find_checkpoint(folder)[0] == 3 and (tmp_path / "run.zip").exists()
    done = run_script(**SETTINGS | EVALUATED | {"OUTPUT_DIR": folder, "TOTAL_STEPS": 4})
    assert "continuing from step 3" in done.stdout
    assert not (folder / EXIT).exists()
    done = torchrun(folder=folder, **EVALUATED)
    assert "continuing from step 4" in done.stdout
    assert [done.stdout.count(words) for words in ("\nThis run\n", "step 6/6", "grpo: complete: 6")] == [1, 1, 1]
    assert_alike(folder, whole)
    ours, theirs = ({path.name for path in run.iterdir() if "checkpoint" not in path.name} for run in (folder, whole))
    assert ours == theirs | {EXIT}
    measured = [[row["heldout_reward"] for row in read_csv(run / "metrics.csv")] for run in (folder, whole)]
    assert measured[0] == measured[1] and measured[0][2] and read_exit(folder)[0] == 0


def test_a_launch_that_waits_for_another_machine_can_be_stopped():
    """torchrun itself heeds no signal then, and scripts/torchrun.sh has no process yet that it could pass one on to."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    command = ["bash", "scripts/torchrun.sh", "--nnodes", "2", "--node-rank", "0", "--master-port", port]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    with subprocess.Popen([*command, "--master-addr", "127.0.0.1"], cwd=ROOT, env=CLEAN | {"PATH": path}) as process:

        def is_waiting() -> bool:
            with socket.socket() as client:
                return not client.connect_ex(("127.0.0.1", int(port)))

        wait_until(is_waiting, process)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        process.send_signal(signal.SIGTERM)
        try:
            assert process.wait(30)
        finally:
            for pid in map(int, children):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def test_a_killed_rank_0_is_named_with_the_last_checkpoint(tmp_path):
    """By another one, as rank 0 says nothing any more."""
    folder = tmp_path / "run"
    process = start_held(folder, 2, *TORCHRUN, "--no-python", EVAL_SAMPLES=0)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    ranks = {Path(f"/proc/{pid}/environ").read_bytes().split(b"\0RANK=")[1][:1]: int(pid) for pid in children}
    os.kill(ranks[b"0"], signal.SIGKILL)
    wait_until(lambda: not Path(f"/proc/{ranks[b'0']}/fd").exists() or process.poll() is not None)
    go_on(folder)
    output = finish(process)
    code, reason = read_exit(folder)
    assert process.returncode == 1 and code == 1, output
    lost = "rank 0 ended without a word (killed, or its machine is gone)"
    assert reason == f"{lost}; the same command continues from step 2"
    assert not has_line(folder, ASKED), "the SIGTERM was torchrun's"


def test_the_reason_of_another_rank_is_the_runs(tmp_path):
    """Here a model that rank 1 cannot load."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os\n"
        "if os.environ.get('RANK') == '1':\n"
        "    import grpo.model.load as load\n"
        "    def broken(*arguments): raise ValueError('its file is damaged')\n"
        "    load.load_base = broken\n"
    )
    path = f"{tmp_path}:{ROOT / 'tests'}:{ROOT}"
    torchrun(code=1, folder=tmp_path / "run", PYTHONPATH=path)
    code, reason = read_exit(tmp_path / "run")
    assert code == 1
    assert reason.startswith("rank 1 ended: model: its file is damaged; the same command starts at step 0"), reason
