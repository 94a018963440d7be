# SPDX-License-Identifier: Apache-2.0
"""The processes of a run: which one this is, how they meet and speak, wait for who is late, and notice who is gone."""

from __future__ import annotations

import os
import signal
import sys
import time

import numpy as np
import psutil
import pytest
import torch
from ranked import in_ranks, launcher_store

from grpo.common import InputError
from grpo.process import exchange, heartbeat
from grpo.process.heartbeat import RankLost
from grpo.process.launcher import LAUNCH_VARIABLES
from grpo.process.ranks import Ranks

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "host",
            "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "x", "TORCHELASTIC_USE_AGENT_STORE": "True",
            "ACCELERATE_USE_FSDP": "true"}  # fmt: skip


@pytest.mark.parametrize(
    ("visible", "mine"), [(None, "1"), ("3,5", "5"), ("GPU-a, GPU-b", "GPU-b"), ("2", ""), ("", ""), ("-1", "-1")]
)
def test_a_process_sees_its_own_gpu_and_no_launcher(monkeypatch, quiet, visible, mine):
    monkeypatch.setattr(sys, "stdout", sys.stdout)
    monkeypatch.setattr(sys, "stderr", sys.stderr)
    environ = TORCHRUN | {"PATH": "x", "NCCL_SOCKET_IFNAME": "eth7"}
    environ |= {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    ranks = Ranks.from_environment(environ)
    own = {"CUDA_VISIBLE_DEVICES": mine, "VLLM_PORT": "29601", "VLLM_CACHE_ROOT": "~/.cache/vllm/rank-1"}
    own |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "eth7"}
    assert environ == {"PATH": "x"} | own
    assert (ranks.rank, ranks.size, ranks.address, ranks.port, ranks.launched) == (1, 2, "host", 29500, True)


def test_processes_of_several_machines_choose_their_own_network(quiet):
    """And one process alone takes one GPU of several."""
    for size in "12":
        environ = TORCHRUN | {"RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "WORLD_SIZE": size}
        ranks = Ranks.from_environment(environ)
        assert ranks.size == int(size) and ranks.launched and environ == {"CUDA_VISIBLE_DEVICES": "0"}


@pytest.mark.parametrize("missing", LAUNCH_VARIABLES)
def test_without_a_launcher_a_process_is_alone(missing):
    """Some clouds set WORLD_SIZE=1 and RANK=0 for a single machine."""
    environ = {name: value for name, value in (TORCHRUN | {"WORLD_SIZE": "1", "RANK": "0"}).items() if name != missing}
    before = dict(environ)
    ranks = Ranks.from_environment(environ)
    assert (ranks.size, ranks.launched, environ) == (1, False, before) and ranks.share_out(7) == range(7)


@pytest.mark.parametrize(
    "names", [LAUNCH_VARIABLES[:2], (*LAUNCH_VARIABLES[:2], "MASTER_ADDR", "MASTER_PORT"), ["WORLD_SIZE"]]
)
def test_several_processes_that_do_not_know_each_other_are_refused(names):
    """As Kubeflow and mpirun start them: each would train the same run alone."""
    with pytest.raises(InputError) as refused:
        Ranks.from_environment({name: TORCHRUN[name] for name in names})
    (problem,) = refused.value.args
    missing = ", ".join(name for name in LAUNCH_VARIABLES if name not in names)
    assert problem.startswith(f"WORLD_SIZE=2 is set without {missing}: each of 2 processes would train alone. ")
    assert problem.endswith("Start them with torchrun or `accelerate launch`, or unset WORLD_SIZE")


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ({"RANK": "5"}, "RANK=5, WORLD_SIZE=2, .*: a rank is a number from 0 to one below"),
        ({"RANK": "-1"}, "RANK=-1, "),
        ({"RANK": "x"}, "RANK, WORLD_SIZE, .*: invalid literal"),
        ({"LOCAL_RANK": "2"}, "LOCAL_RANK=2, LOCAL_WORLD_SIZE=2"),
        ({"LOCAL_WORLD_SIZE": "3"}, "LOCAL_WORLD_SIZE=3"),
        ({"TORCHELASTIC_USE_AGENT_STORE": ""}, "WORLD_SIZE=2 was not set by torchrun or `accelerate launch`"),
    ],
)
def test_ranks_that_cannot_be_are_refused(wrong, problem):
    with pytest.raises(ValueError, match=problem):
        Ranks.from_environment(TORCHRUN | wrong)


@pytest.mark.parametrize(
    ("count", "group", "size", "sizes"),
    [(24, 3, 3, [9, 9, 6]), (8, 1, 3, [3, 3, 2]), (6, 6, 4, [6, 0, 0, 0]), (7, 2, 2, [4, 3]), (0, 2, 2, [0, 0])],
)
def test_groups_are_shared_out_whole(count, group, size, sizes):
    shares = [Ranks(rank, size).share_out(count, group) for rank in range(size)]
    assert [len(share) for share in shares] == sizes and [i for share in shares for i in share] == list(range(count))


SILENT = "ended without a word"


def speak(ranks):
    """Exchanges a message, a broadcast, a tensor, and a sum of numbers that differ between ranks."""
    summed = torch.tensor([2.0**-ranks.rank, float(ranks.rank), 1 / 3])
    ranks.sum_tensor(summed)
    first = torch.full((3,), ranks.rank + 7)
    ranks.broadcast_tensor(first)
    messages = ranks.share([ranks.rank, float("nan"), None, "x" * ranks.rank, [1 / 3, np.float32(0.5), np.int64(7)]])
    assert not torch.distributed.is_initialized(), "TRL, accelerate and vLLM see one process"
    origin = ranks.broadcast({"from": ranks.rank})
    assert all(message[2:] == [None, "x" * rank, [1 / 3, 0.5, 7]] for rank, message in enumerate(messages))
    return [m[0] for m in messages], origin, summed.tolist(), first.tolist()


def test_all_hear_the_same():
    expected = [0, 1, 2], {"from": 0}, [1.75, 3.0, pytest.approx(1.0)], [7, 7, 7]
    results = in_ranks(3, speak)
    assert results == [expected] * 3 and len({str(result) for result in results}) == 1, "bit for bit"


def test_nobody_waits_for_ever(monkeypatch):
    monkeypatch.setattr(exchange, "CONNECT_S", 0.3)
    with launcher_store() as (port, _), pytest.raises(RankLost, match="rank 1 ended: it did not connect within"):
        Ranks(0, 2, 0, 2, "127.0.0.1", port).connect()


@pytest.mark.parametrize(("machines", "rounds"), [(1, 2), (2, 45)])
def test_a_stopped_process_is_waited_for(monkeypatch, machines, rounds):
    """On the same machine also where it is stopped for longer than a machine may be silent."""
    monkeypatch.setattr(heartbeat, "SILENT_ROUNDS", rounds)

    def go_on_later(port, host, pids):
        while psutil.Process(pids[1]).status() != psutil.STATUS_STOPPED:
            time.sleep(0.05)
        time.sleep(4)
        os.kill(pids[1], signal.SIGCONT)

    def stop(ranks):
        ranks.share(0)
        started = time.monotonic()
        if ranks.rank:
            os.kill(os.getpid(), signal.SIGSTOP)
        return ranks.share(ranks.rank), time.monotonic() - started

    results = in_ranks(2, stop, local_size=2 // machines, beside=go_on_later)
    assert all(shared == [0, 1] and waited >= 4 for shared, waited in results)


@pytest.mark.parametrize(("dead", "local_size"), [(0, 3), (2, 1)])
def test_who_is_killed_is_named(monkeypatch, dead, local_size):
    """By all others, also where it had said something before. On another machine its silence says it."""
    monkeypatch.setattr(heartbeat, "SILENT_ROUNDS", 3)

    def killed(ranks):
        ranks.share(0)
        if ranks.rank == dead:
            os.kill(os.getpid(), signal.SIGKILL)
        for _ in range(2):
            ranks.share("a")

    results = in_ranks(3, killed, local_size=local_size)
    assert results[dead] is None
    assert [str(result)[: len(SILENT) + 7] for result in results if result] == [f"rank {dead} {SILENT}"] * 2


def test_the_last_message_arrives():
    """From a process that leaves in the middle of what all speak about, to those that wait and to one that is late."""

    def fails(ranks):
        if ranks.rank == 1:
            ranks.disconnect(4, "vLLM: no memory")
            return
        time.sleep(2 * (ranks.rank == 2))
        ranks.share(None)

    first, _, third = in_ranks(3, fails)
    assert [(error.rank, error.code, error.message) for error in (first, third)] == [(1, 4, "vLLM: no memory")] * 2


def test_a_process_that_does_not_notice_is_ended(monkeypatch, tmp_path):
    """A process in a rollout is an example. It is ended after it was told which process is gone."""
    monkeypatch.setattr(heartbeat, "GRACE_S", 0.2)
    ready, message = tmp_path / "ready", tmp_path / "message"

    def busy(ranks):
        if ranks.rank:
            while not ready.exists():
                time.sleep(0.01)
            os._exit(1)
        ranks.on_lost = lambda lost: message.write_text(str(lost))
        ready.touch()
        time.sleep(100)
        return "was not ended"

    assert in_ranks(2, busy) == [None, None]
    assert message.read_text().startswith(f"rank 1 {SILENT}")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_store_that_is_gone_is_rank_0s_machine(monkeypatch, number):
    """Whether it closes its connections or, as a machine without power, never answers again."""
    monkeypatch.setattr(heartbeat, "SILENT_ROUNDS", 3)

    def wait(ranks):
        time.sleep(100 * (ranks.rank == 0))
        ranks.share(0)

    def end_host_then_rank_0(port, host, pids):
        time.sleep(2)
        os.kill(host, number)
        time.sleep(6)
        os.kill(pids[0], signal.SIGKILL)

    assert str(in_ranks(2, wait, local_size=1, beside=end_host_then_rank_0)[1]).startswith(f"rank 0 {SILENT}")


def test_a_signal_is_answered_while_others_are_waited_for():
    def wait(ranks):
        if ranks.rank:
            time.sleep(3)
            return None
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        started = time.monotonic()
        try:
            ranks.share(0)
        except KeyboardInterrupt:
            return time.monotonic() - started

    assert in_ranks(2, wait)[0] < 2.5
