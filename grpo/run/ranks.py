# SPDX-License-Identifier: Apache-2.0
"""One process a GPU: which of them this one is, and how they speak to each other."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import math
import os
import select
import signal
import socket
import struct
import sys
import threading
import time
from array import array
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from typing import Any

# What torchrun and `accelerate launch` tell each process. The program takes it out of the environment: TRL, accelerate,
# transformers and vLLM then each see one process with one GPU, and nothing of theirs shards or wraps.
GIVEN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
LAUNCHERS = ("TORCHELASTIC_", "ACCELERATE_")
PORTS = 16  # behind MASTER_PORT, which torchrun itself may hold, that are tried
CONNECT_S = 300.0  # until all have come
GRACE_S = 20.0  # to end by itself for a process that lost another one: torchrun kills 30 s after it noticed
HEAD = struct.Struct("!cQ")  # of a message: whether it is the sender's last, and its length in bytes
DATA, END = b"D", b"E"


class RankLost(RuntimeError):
    """Another process ended: with an exit code and words of its own, or without a word."""

    def __init__(self, rank: int, code: int = 1, words: str = ""):
        super().__init__(rank, code, words)
        self.rank, self.code, self.words = rank, code, words

    def __str__(self) -> str:
        silent = "ended without a word (killed, or its machine is gone)"
        return f"rank {self.rank} {f'ended: {self.words}' if self.words else silent}"


class Ranks:
    """The processes of a run, each with a GPU; rank 0 writes and decides. Alone, nothing here opens a connection.

    Their messages are JSON or plain numbers, and go through rank 0 on connections that this program opens itself, not
    torch's gloo: the checks before a run import no torch; a wait in gloo answers no signal; and its one timeout has to be
    longer than any evaluation on rank 0, while a closed connection is seen at once.
    All that speak raise RankLost.
    """

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        local_rank: int = 0,
        local_size: int = 1,
        address: str = "",
        port: int = 0,
        run: str = "",
    ):
        self.rank, self.size, self.local_rank, self.local_size = rank, size, local_rank, local_size
        self.address = "127.0.0.1" if local_size == size else address
        self.ports = [port + n if port + PORTS < 2**16 else port - n for n in range(1, PORTS + 1)]
        self.token = hashlib.sha256(f"train_grpo {size} {port} {run}".encode()).digest()  # tells runs apart
        # A connection to a port where nobody listens yet may come out at its own end, and say what it was told.
        self.answer = hashlib.sha256(self.token).digest()
        self.peers: dict[int, socket.socket] = {}  # of rank 0: all others; of another: rank 0
        self.last_words: Callable[[RankLost], None] = lambda lost: None  # of a process that cannot end by itself
        self.left = False
        self.launched = False  # by torchrun or one like it, whose own exit code says nothing
        self.summed_bytes = 0  # of what was added up with the others, for the benchmark

    @classmethod
    def started(cls, environ: MutableMapping[str, str] = os.environ) -> Ranks:
        """This process's place by `environ`, out of which it is taken. CUDA_VISIBLE_DEVICES then names its one GPU (none
        where there are fewer than processes), so torch must not have used CUDA yet. All but rank 0 fall silent."""
        if not all(environ.get(name) for name in GIVEN):
            return cls()
        rank, size, local_rank, local_size = (int(environ[name]) for name in GIVEN[:4])
        run = environ.get("TORCHELASTIC_RUN_ID", "") + environ.get("TORCHELASTIC_RESTART_COUNT", "")
        ranks = cls(rank, size, local_rank, local_size, environ["MASTER_ADDR"], int(environ["MASTER_PORT"]), run)
        for name in [name for name in environ if name in GIVEN or name.startswith(LAUNCHERS)]:
            del environ[name]
        visible = environ.get("CUDA_VISIBLE_DEVICES")
        if visible not in ("", "-1"):
            cards = visible.split(",") if visible else list(map(str, range(local_size)))
            environ["CUDA_VISIBLE_DEVICES"] = cards[local_rank].strip() if local_rank < len(cards) else ""
        # Engines that start at the same time, each with its own ports and place for what it compiles.
        if local_size > 1:
            own = environ.get("VLLM_PORT", "")  # Kubernetes sets an address for a service of that name
            environ["VLLM_PORT"] = str((int(own) if own.isdigit() else ranks.ports[-1] + 1) + 100 * local_rank)
            root = environ.get("VLLM_CACHE_ROOT") or os.path.join(environ.get("XDG_CACHE_HOME") or "~/.cache", "vllm")
            environ["VLLM_CACHE_ROOT"] = os.path.join(root, f"rank-{local_rank}") if local_rank else root
        if rank:
            sys.stdout = sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
        for name in (signal.SIGINT, signal.SIGTERM):  # which scripts/torchrun.sh has ignored
            signal.signal(name, signal.default_int_handler)
        ranks.launched = True
        return ranks

    def share_out(self, count: int, group: int = 1) -> range:
        """The part of `count` rows that is this process's: whole groups where `group` divides them; the first ranks have
        one more where there is a rest."""
        group = group if count % group == 0 else 1
        groups = count // group
        first, after = (groups // self.size * n + min(n, groups % self.size) for n in (self.rank, self.rank + 1))
        return range(first * group, after * group)

    # ---- Speaking: every process calls the same of these, in the same order ----

    def gather(self, value: Any) -> list[Any]:
        """What JSON makes of every rank's value, in order, on rank 0; nothing on the others."""
        if self.rank:
            self._send(0, DATA, json.dumps(value).encode())
            return []
        return [value, *(json.loads(self._receive(peer)) for peer in self.peers)]

    def broadcast(self, value: Any = None) -> Any:
        """Rank 0's value; the others' does not matter."""
        return json.loads(found) if (found := self._spread(lambda: json.dumps(value).encode())) else value

    def share(self, value: Any) -> list[Any]:
        """Every rank's value, in order, on all of them."""
        return self.broadcast(self.gather(value))

    def share_rows(self, rows: Sequence[Sequence[float | None]], kind: str) -> list[Any]:
        """Every rank's rows of numbers, in order, on all of them: as `share` does, but as numbers of an array's `kind` (`i`, `d`),
        since JSON takes many times as long. None and NaN both arrive as None."""
        if self.size == 1:
            return list(rows)
        lengths = [length for theirs in self.share(list(map(len, rows))) for length in theirs]
        mine = array(kind, (math.nan if value is None else value for row in rows for value in row)).tobytes()
        numbers = array(kind)
        numbers.frombytes(self.broadcast_bytes(b"".join([mine, *self.others_bytes(mine)])))
        one = iter(numbers)
        return [[None if value != value else value for value in itertools.islice(one, length)] for length in lengths]

    def broadcast_bytes(self, data: Any = b"") -> Any:
        """Rank 0's bytes; the others' do not matter."""
        found = self._spread(lambda: data)
        return data if found is None else found

    def others_bytes(self, data: Any) -> Iterator[bytearray]:
        """The bytes of every other rank, in order, on rank 0; nothing on the others, whose bytes these are."""
        if self.rank:
            self._send(0, DATA, data)
        else:
            yield from map(self._receive, self.peers)

    def _spread(self, data: Callable[[], Any]) -> bytearray | None:
        """Rank 0's message on the others; None on rank 0."""
        if self.rank:
            return self._receive(0)
        if self.peers:
            message = data()
            for peer in self.peers:
                self._send(peer, DATA, message)
        return None

    def _send(self, peer: int, kind: bytes, data: Any) -> None:
        try:
            self.peers[peer].sendall(HEAD.pack(kind, len(data)))
            self.peers[peer].sendall(data)
        except OSError:
            raise self._lost(peer) from None

    def _receive(self, peer: int) -> bytearray:
        kind, length = HEAD.unpack(self._exactly(peer, HEAD.size))
        data = self._exactly(peer, length)
        if kind == END:
            raise RankLost(peer, *json.loads(data))
        return data

    def _exactly(self, peer: int, length: int) -> bytearray:
        data, at = bytearray(length), 0
        view = memoryview(data)
        while at < length:
            try:
                some = self.peers[peer].recv_into(view[at:])
            except OSError:
                some = 0
            if not some:
                raise RankLost(peer)
            at += some
        return data

    def _lost(self, peer: int) -> RankLost:
        """Why a process is gone: its last message, where there is one behind what it also sent."""
        try:
            while True:
                self._receive(peer)
        except RankLost as lost:
            return lost

    # ---- Coming and going ----

    def connect(self) -> None:
        """Wait for all others."""
        if self.size == 1:
            return
        deadline = time.monotonic() + CONNECT_S
        self.peers = {0: self._reach(deadline)} if self.rank else self._await(deadline)
        for one in self.peers.values():
            one.settimeout(None)
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            # A machine that is gone closes nothing: it is asked after 10 s of silence, and taken for lost 20 s later.
            for option, value in ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 4)):
                one.setsockopt(socket.IPPROTO_TCP, option, value)
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 30_000)  # ms, of what was sent
        threading.Thread(target=self._watch, daemon=True).start()

    def _await(self, deadline: float) -> dict[int, socket.socket]:
        found: dict[int, socket.socket] = {}
        with self._listen() as server:
            while missing := sorted(set(range(1, self.size)) - set(found)):
                server.settimeout(max(deadline - time.monotonic(), 0.01))
                try:
                    one, _ = server.accept()
                except TimeoutError:
                    raise RankLost(missing[0], words=f"it did not come within {CONNECT_S:.0f} s") from None
                said = heard(one, len(self.token) + 4)
                if said[:-4] != self.token:  # another run's, or some other program
                    one.close()
                    continue
                one.sendall(self.answer)
                found[int.from_bytes(said[-4:], "big")] = one
        return {rank: found[rank] for rank in sorted(found)}

    def _listen(self) -> socket.socket:
        host = self.address if self.local_size == self.size else ""
        for port in self.ports:
            with contextlib.suppress(OSError):
                return socket.create_server((host, port), backlog=self.size)
        raise RankLost(
            0, words=f"none of the ports {self.ports[0]} to {self.ports[-1]} is free. Choose another --master-port"
        )

    def _reach(self, deadline: float) -> socket.socket:
        while time.monotonic() < deadline:
            for port in self.ports:
                with contextlib.suppress(OSError):
                    one = socket.create_connection((self.address, port), timeout=10)
                    one.sendall(self.token + self.rank.to_bytes(4, "big"))
                    if heard(one, len(self.answer)) == self.answer:
                        return one
                    one.close()
            time.sleep(0.1)
        raise RankLost(0, words=f"nobody answers at {self.address}, ports {self.ports[0]} to {self.ports[-1]}")

    def is_broken(self) -> bool:
        """Whether another process is gone already: then a SIGTERM is torchrun's, which ends all when one has ended."""
        return not self.left and bool(self._gone(0))

    def _gone(self, wait_ms: int) -> list[int]:
        poll = select.poll()
        peers = {one.fileno(): peer for peer, one in self.peers.items() if one.fileno() >= 0}
        for number in peers:
            poll.register(number, select.POLLRDHUP)
        return sorted(peers[number] for number, _ in poll.poll(wait_ms))

    def _watch(self) -> None:
        """End this process where another one is gone and it does not notice: in a rollout, or waiting for what never comes."""
        while not self.left:
            if gone := self._gone(1000):
                started = time.monotonic()
                while time.monotonic() < started + GRACE_S:
                    time.sleep(0.1)
                    if self.left:
                        return
                lost = self._lost(gone[0])
                self.last_words(lost)
                os._exit(lost.code or 1)

    def leave(self, code: int, words: str = "") -> None:
        """Tell the others how this process ends, with its last words. What it was sent meanwhile is read: closing over it
        would take back what was said."""
        if self.left:
            return
        self.left = True
        data = json.dumps((code, words)).encode()
        for one in self.peers.values():
            with contextlib.suppress(OSError):
                one.settimeout(5)
                one.sendall(HEAD.pack(END, len(data)) + data)
                one.shutdown(socket.SHUT_WR)
        for one in self.peers.values():
            with contextlib.suppress(OSError):
                while one.recv(2**20):
                    pass
            one.close()


def heard(one: socket.socket, length: int) -> bytes:
    """Up to `length` bytes that came within 10 s."""
    data = b""
    with contextlib.suppress(OSError):
        one.settimeout(10)
        while len(data) < length and (some := one.recv(length - len(data))):
            data += some
    return data
