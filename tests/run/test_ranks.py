# SPDX-License-Identifier: Apache-2.0
"""Which process of a run this one is, and its share of the rows."""

from __future__ import annotations

import sys

import pytest

from grpo.run.ranks import LAUNCH_VARIABLES, Ranks

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "host",
            "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "x", "TORCHELASTIC_USE_AGENT_STORE": "True",
            "ACCELERATE_USE_FSDP": "true"}  # fmt: skip


@pytest.mark.parametrize(
    ("visible", "mine"), [(None, "1"), ("3,5", "5"), ("GPU-a, GPU-b", "GPU-b"), ("2", ""), ("", ""), ("-1", "-1")]
)
def test_a_process_sees_its_own_gpu_and_no_launcher(monkeypatch, quiet, visible, mine):
    monkeypatch.setattr(sys, "stdout", sys.stdout)
    monkeypatch.setattr(sys, "stderr", sys.stderr)
    environ = TORCHRUN | {"PATH": "x", "VLLM_PORT": "tcp://10.0.0.1:80", "NCCL_SOCKET_IFNAME": "eth7"}
    environ |= {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    ranks = Ranks.from_environment(environ)
    own = {"CUDA_VISIBLE_DEVICES": mine, "VLLM_PORT": "29601", "VLLM_CACHE_ROOT": "~/.cache/vllm/rank-1"}
    own |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "eth7"}
    assert environ == {"PATH": "x"} | own
    assert (ranks.rank, ranks.size, ranks.address, ranks.port, ranks.launched) == (1, 2, "host", 29500, True)


def test_processes_of_several_machines_choose_their_own_network(monkeypatch, quiet):
    """And one process alone takes one GPU of several."""
    for size in "12":
        environ = TORCHRUN | {"RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "WORLD_SIZE": size}
        ranks = Ranks.from_environment(environ)
        assert ranks.size == int(size) and ranks.launched and environ == {"CUDA_VISIBLE_DEVICES": "0"}


@pytest.mark.parametrize("missing", LAUNCH_VARIABLES)
def test_without_a_launcher_a_process_is_alone(missing):
    """Some clouds set WORLD_SIZE and RANK for machines."""
    environ = {name: value for name, value in TORCHRUN.items() if name != missing}
    before = dict(environ)
    ranks = Ranks.from_environment(environ)
    assert (ranks.size, ranks.launched, environ) == (1, False, before) and ranks.share_out(7) == range(7)


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ({"RANK": "5"}, "RANK=5, WORLD_SIZE=2, .*: a rank is a number from 0 to one below"),
        ({"RANK": "-1"}, "RANK=-1, "),
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
