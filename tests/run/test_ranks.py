# SPDX-License-Identifier: Apache-2.0
"""Processes of one run find each other, speak, and notice when one is gone."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import sys
import threading
import time

import pytest
from ranked import free_port, in_ranks

from grpo.run import ranks as module
from grpo.run.ranks import GIVEN, RankLost, Ranks

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "host",
            "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "x", "ACCELERATE_USE_FSDP": "true"}  # fmt: skip


@pytest.mark.parametrize(
    ("visible", "mine"), [(None, "1"), ("3,5", "5"), ("GPU-a, GPU-b", "GPU-b"), ("2", ""), ("", ""), ("-1", "-1")]
)
def test_a_process_sees_its_own_gpu_and_no_launcher(monkeypatch, quiet, visible, mine):
    monkeypatch.setattr(sys, "stdout", sys.stdout)
    monkeypatch.setattr(sys, "stderr", sys.stderr)
    environ = (
        TORCHRUN
        | {"PATH": "x", "VLLM_PORT": "tcp://10.0.0.1:80"}
        | ({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})
    )
    ranks = Ranks.started(environ)
    own = {"CUDA_VISIBLE_DEVICES": mine, "VLLM_PORT": "29617", "VLLM_CACHE_ROOT": "~/.cache/vllm/rank-1"}
    assert environ == {"PATH": "x"} | own and (ranks.rank, ranks.size) == (1, 2)
    assert ranks.token != Ranks.started(TORCHRUN | {"TORCHELASTIC_RUN_ID": "y"}).token, "two runs of one machine"


def test_one_process_takes_one_gpu_of_several(quiet):
    environ = TORCHRUN | {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    ranks = Ranks.started(environ)
    assert (
        ranks.size == 1
        and ranks.launched
        and not Ranks.started({}).launched
        and environ == {"CUDA_VISIBLE_DEVICES": "0"}
    )


@pytest.mark.parametrize("missing", GIVEN)
def test_without_a_launcher_a_process_is_alone(missing):
    """Some clouds set WORLD_SIZE and RANK for machines."""
    environ = {name: value for name, value in TORCHRUN.items() if name != missing}
    before = dict(environ)
    ranks = Ranks.started(environ)
    ranks.connect()
    assert (ranks.size, environ) == (1, before) and ranks.share({"a": (1,)}) == [{"a": (1,)}]
    assert ranks.broadcast(5) == 5 and ranks.share_out(7) == range(7) and not ranks.is_broken()


@pytest.mark.parametrize(
    ("count", "group", "size", "sizes"),
    [(24, 3, 3, [9, 9, 6]), (8, 1, 3, [3, 3, 2]), (6, 6, 4, [6, 0, 0, 0]), (7, 2, 2, [4, 3]), (0, 2, 2, [0, 0])],
)
def test_groups_are_shared_out_whole(count, group, size, sizes):
    shares = [Ranks(rank, size).share_out(count, group) for rank in range(size)]
    assert [len(share) for share in shares] == sizes and [i for share in shares for i in share] == list(range(count))


def test_all_hear_the_same():
    def speak(ranks):
        said = ranks.share([ranks.rank, float("nan"), None])
        numbers = [bytes(one) for one in ranks.others_bytes(memoryview(bytes([ranks.rank]) * 10**6))]
        assert [one[:1] for one in numbers] == ([] if ranks.rank else [b"\1", b"\2"])
        return [one[0] for one in said], ranks.broadcast({"from": ranks.rank}), len(ranks.broadcast_bytes(b"x" * 9**7))

    assert in_ranks(3, speak) == [([0, 1, 2], {"from": 0}, 9**7)] * 3


def test_rows_of_numbers_are_shared():
    """Whole numbers and floats to the last bit, rows of any length, none at all from some, and what is unknown."""
    ids = [[[1, 2**31 - 1], []], [], [[7]]]
    floats = [[[0.1, None, -1e-300], []], [], [[math.nan]]]
    expected = [[1, 2**31 - 1], [], [7]], [[0.1, None, -1e-300], [], [None]]

    def speak(ranks):
        return ranks.share_rows(ids[ranks.rank], "i"), ranks.share_rows(floats[ranks.rank], "d")

    assert in_ranks(3, speak) == [expected] * 3
    assert Ranks().share_rows(ids[0], "i") == ids[0]


def test_another_program_on_the_port_is_passed_over():
    port, said = free_port(), b"HTTP/1.1 400 Bad Request" * 9
    with socket.create_server(("127.0.0.1", port + 1)) as other:
        threading.Thread(target=lambda: other.accept()[0].sendall(said), daemon=True).start()
        assert in_ranks(2, lambda ranks: ranks.share(ranks.rank), port=port) == [[0, 1]] * 2


def test_nobody_waits_for_ever(monkeypatch):
    monkeypatch.setattr(module, "CONNECT_S", 0.3)
    with pytest.raises(RankLost, match="rank 1 ended: it did not come within"):
        Ranks(0, 2, 0, 2, port=free_port()).connect()
    with pytest.raises(RankLost, match="nobody answers at 127.0.0.1"):
        Ranks(1, 2, 1, 2, port=free_port()).connect()


@pytest.mark.parametrize("dead", [0, 2])
def test_who_is_killed_is_named(dead):
    """Also where it had said something before, and while the others are about to speak."""

    first = 0 if dead else 1

    def killed(ranks):
        ranks.share(0)
        if ranks.rank == dead:
            if ranks.rank:
                ranks.gather("said and gone")
            os.kill(os.getpid(), signal.SIGKILL)
        while not ranks.is_broken() and ranks.rank == first:
            time.sleep(0.01)
        for _ in range(2):
            ranks.gather("a")
            ranks.broadcast()

    found = in_ranks(3, killed)
    assert found[dead] is None and str(found[first]).startswith(f"rank {dead} ended without a word")
    if dead:
        assert str(found[1]).startswith("rank 0 ended: rank 2 ended without a word"), "rank 0 passes it on"


def test_last_words_are_heard_though_more_was_said_before():
    def fails(ranks):
        if ranks.rank == 1:
            ranks.gather("part of a step")
            ranks.leave(4, "vLLM: no memory")
            return
        while not ranks.is_broken():
            time.sleep(0.01)
        ranks.broadcast_bytes(bytes(10**7))  # more than a buffer holds
        ranks.gather(None)
        ranks.gather(None)

    error, _ = in_ranks(2, fails)
    assert (error.rank, error.code, error.words) == (1, 4, "vLLM: no memory")


def test_a_process_that_does_not_notice_is_ended(monkeypatch, tmp_path):
    """In a rollout, say: with its last words."""
    monkeypatch.setattr(module, "GRACE_S", 0.2)

    def busy(ranks):
        if ranks.rank:
            os._exit(1)
        ranks.last_words = lambda lost: (tmp_path / "said").write_text(str(lost))
        time.sleep(100)

    assert in_ranks(2, busy) == [None, None]
    assert (tmp_path / "said").read_text().startswith("rank 1 ended without a word")


def test_an_echo_is_not_rank_0(monkeypatch):
    """What a port of a machine's own range does that connects to itself, one time in some thousands."""
    monkeypatch.setattr(module, "CONNECT_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as server:

        def echo() -> None:
            with contextlib.suppress(OSError):
                while True:
                    one, _ = server.accept()
                    one.sendall(one.recv(1000))

        threading.Thread(target=echo, daemon=True).start()
        ranks = Ranks(1, 2, 1, 2, "127.0.0.1", 29500)
        ranks.ports = [server.getsockname()[1]]
        with pytest.raises(RankLost, match="nobody answers"):
            ranks.connect()
