# SPDX-License-Identifier: Apache-2.0
"""The sleep backend on a GPU of host buffers."""

from __future__ import annotations

import ctypes
import importlib
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from grpo.preflight.hub import REAL_CONFIG
from grpo.rollout.vllm_patches import keep_weights_asleep

KEEP = 4096  # bytes, in place of KEEP_BYTES


BLOCKS = {  # name: (tag, bytes)
    "experts": ("weights", KEEP),
    "embedding": ("weights", KEEP + 100),
    "qkv_proj": ("weights", KEEP - 1),
    "lora buffer": ("weights", 64),
    "cache": ("kv_cache", 2 * KEEP),
    "small cache": ("kv_cache", 64),
}


LARGE, SMALL, CACHE = ({"experts", "embedding"}, {"qkv_proj", "lora buffer"}, {"cache", "small cache"})


class FakeGPU:
    """Blocks as vLLM's allocator lists them, each a host buffer. A block that is unmapped loses what it held, and as on
    a GPU neither a copy nor a second unmapping may touch it. `copies` lists (to host or to gpu, block, bytes)."""

    def __init__(self) -> None:
        self.buffers = {name: torch.full((size,), i + 1, dtype=torch.uint8) for i, (name, (_, size)) in enumerate(BLOCKS.items())}  # fmt: skip
        self.names = {buffer.data_ptr(): name for name, buffer in self.buffers.items()}
        self.mapped = set(BLOCKS)
        self.copies: list[tuple[str, str, int]] = []
        self.registered: dict[int, int] = {}  # address of pinned host memory -> bytes
        self.checked: list[int] = []
        self.pinned: list[int] = []  # bytes of the host memory that torch pinned
        self.emptied: list[set[str]] = []  # what was mapped when torch's cache was emptied
        self.host_register_code = 0
        self.pointer_to_data = {
            pointer: SimpleNamespace(handle=(0, BLOCKS[name][1], pointer, 7), tag=BLOCKS[name][0], cpu_backup_tensor=None, is_asleep=False)
            for pointer, name in self.names.items()
        }  # fmt: skip

    def cudaMemcpy(self, target: int, source: int, size: int) -> None:
        direction = "host" if source in self.names else "gpu"
        name = self.names[source if direction == "host" else target]
        assert name in self.mapped and size == BLOCKS[name][1]
        ctypes.memmove(target, source, size)
        self.copies.append((direction, name, size))

    def create_and_map(self, handle: tuple[int, int, int, int]) -> None:
        name = self.names[handle[2]]
        assert name not in self.mapped
        self.mapped.add(name)

    def unmap_and_release(self, handle: tuple[int, int, int, int]) -> None:
        name = self.names[handle[2]]
        self.mapped.remove(name)
        self.buffers[name].fill_(255)

    def host_register(self, pointer: int, size: int, flags: int) -> int:
        self.registered[pointer] = size
        return self.host_register_code

    def copied(self, direction: str) -> set[str]:
        """The blocks that were copied there since the last call, none of them twice."""
        found = [name for way, name, _ in self.copies if way == direction]
        self.copies = [copy for copy in self.copies if copy[0] != direction]
        assert len(set(found)) == len(found)
        return set(found)

    def asleep(self) -> set[str]:
        return {self.names[pointer] for pointer, data in self.pointer_to_data.items() if data.is_asleep}

    def values(self) -> dict[str, int]:
        """The value that fills each block; a block of several values is an error."""
        values = {name: set(buffer.tolist()) for name, buffer in self.buffers.items()}
        assert all(len(one) == 1 for one in values.values())
        return {name: one.pop() for name, one in values.items()}


class FakeSleepModeBackend:
    def __init__(self) -> None:
        self._state = "RUNNING"


@pytest.fixture
def asleep(monkeypatch):
    """(fake GPU, the backend that `keep_weights_asleep` registers), found as vLLM finds it."""
    gpu, registry = FakeGPU(), {}
    package, cumem, backends = (
        ModuleType(f"vllm.device_allocator{name}") for name in ("", ".cumem", ".sleep_mode_backend")
    )
    package.get_mem_allocator_instance = lambda: gpu
    cumem.libcudart, cumem.create_and_map, cumem.unmap_and_release = gpu, gpu.create_and_map, gpu.unmap_and_release
    backends.SleepModeBackend = FakeSleepModeBackend
    backends.SleepModeBackendFactory = SimpleNamespace(
        register_backend=lambda name, module, class_name: registry.update({name: (module, class_name)})
    )
    for module in (package, cumem, backends):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    empty = torch.empty

    def pinned(size, *, dtype, pin_memory=False):
        gpu.pinned += [size] * pin_memory
        return empty(size, dtype=dtype)

    monkeypatch.setattr(torch, "empty", pinned)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=gpu.host_register))
    monkeypatch.setattr(torch.cuda, "check_error", gpu.checked.append)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: gpu.emptied.append(set(gpu.mapped)))
    config = SimpleNamespace(sleep_mode_backend="cumem")
    llm = SimpleNamespace(llm_engine=SimpleNamespace(vllm_config=SimpleNamespace(model_config=config)))
    keep_weights_asleep(llm)
    path, class_name = registry[config.sleep_mode_backend]
    module = importlib.import_module(path)
    gpu.keep_bytes = module.KEEP_BYTES
    monkeypatch.setattr(module, "KEEP_BYTES", KEEP)
    backend = getattr(module, class_name)()
    assert isinstance(backend, FakeSleepModeBackend) and backend.preserves_communicators()
    yield gpu, backend
    del sys.modules[path]  # it holds the fakes


def test_large_weights_are_copied_to_the_host_once(asleep):
    """Small ones at every sleep, a cache never; asleep nothing is mapped."""
    gpu, backend = asleep
    for expected in (LARGE | SMALL, SMALL, SMALL):
        backend.suspend(level=1)
        assert gpu.copied("host") == expected
        assert not gpu.mapped and gpu.asleep() == set(BLOCKS) and backend._state == "SUSPENDED"
        backend.resume()
        assert gpu.copied("gpu") == LARGE | SMALL
        assert gpu.mapped == set(BLOCKS) and not gpu.asleep() and backend._state == "RUNNING"
    assert gpu.emptied == [set()] * 3, "once a sleep, when nothing is mapped any more"


def test_weights_come_back_as_they_were_when_they_slept(asleep):
    """What was written into a small one between two sleeps is kept; a cache comes back with nothing of what it held."""
    gpu, backend = asleep
    before = gpu.values()
    for value in (71, 72, 73):
        backend.suspend()
        assert set(gpu.values().values()) == {255}, "asleep, nothing is left on the GPU"
        backend.resume()
        assert gpu.values() == before | dict.fromkeys(CACHE, 255)
        assert all(data.cpu_backup_tensor is None for data in gpu.pointer_to_data.values()), "small copies are freed"
        for name in SMALL:
            gpu.buffers[name].fill_(value)
            before[name] = value


def test_waking_obeys_tags(asleep):
    gpu, backend = asleep
    backend.suspend()
    backend.resume(["weights"])
    assert gpu.mapped == LARGE | SMALL and gpu.asleep() == CACHE
    assert gpu.copied("gpu") == LARGE | SMALL
    backend.resume(["weights"])  # what is awake is left alone
    assert gpu.asleep() == CACHE and not gpu.copied("gpu")
    backend.resume(tags=["kv_cache"])
    assert gpu.mapped == set(BLOCKS) and not gpu.asleep() and not gpu.copied("gpu")


def test_level_2_is_refused_before_anything_is_lost(asleep):
    gpu, backend = asleep
    before = gpu.values()
    with pytest.raises(ValueError, match="only level 1: level 2 discards the weights"):
        backend.suspend(level=2)
    assert gpu.values() == before and gpu.mapped == set(BLOCKS) and backend._state == "RUNNING"


def test_host_copies_are_pinned(asleep):
    """Those that are kept once, at their exact size, and what the registration returns is checked: 0, or an error of
    CUDA; the others by torch at every sleep."""
    gpu, backend = asleep
    gpu.host_register_code = 5
    for _ in range(2):
        backend.suspend()
        backend.resume()
    assert sorted(gpu.registered.values()) == sorted(BLOCKS[name][1] for name in LARGE)
    assert gpu.checked == [5, 5]
    assert sorted(gpu.pinned) == sorted(2 * [BLOCKS[name][1] for name in SMALL])


def test_weights_that_are_written_are_smaller_than_those_that_are_kept(asleep):
    """Of gpt-oss-20b, in BF16: the largest that a weight sync writes, against the MXFP4 experts of one layer."""
    c = REAL_CONFIG
    qkv = c["hidden_size"] * (c["num_attention_heads"] + 2 * c["num_key_value_heads"]) * c["head_dim"] * 2
    experts = c["num_local_experts"] * c["intermediate_size"] * c["hidden_size"] // 2
    assert qkv < asleep[0].keep_bytes < experts
