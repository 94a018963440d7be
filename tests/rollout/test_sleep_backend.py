# SPDX-License-Identifier: Apache-2.0
"""The sleep backend on a GPU of host buffers."""

from __future__ import annotations

import ctypes
import importlib
import sys
from mmap import PAGESIZE
from types import ModuleType, SimpleNamespace

import pytest
import torch

from grpo.plan.hub import REAL_CONFIG
from grpo.rollout.vllm_patches import keep_weights_asleep

KEEP = PAGESIZE  # bytes, in place of KEEP_BYTES
BLOCKS = {  # name: (tag, bytes)
    "experts": ("weights", KEEP),
    "embedding": ("weights", KEEP + 100),
    "qkv_proj": ("weights", KEEP - 1),
    "lora buffer": ("weights", 64),
    "cache": ("kv_cache", 2 * KEEP),
}
LARGE, SMALL, CACHE = {"experts", "embedding"}, {"qkv_proj", "lora buffer"}, {"cache"}


class FakeGPU:
    """Blocks as vLLM's allocator lists them, each a host buffer. A block that is unmapped loses what it held, and as on
    a GPU neither a copy nor a second unmapping may touch it. `copies` lists the blocks copied to host and to gpu."""

    def __init__(self) -> None:
        self.buffers = {n: torch.full((size,), i, dtype=torch.uint8) for i, (n, (_, size)) in enumerate(BLOCKS.items())}
        self.names = {buffer.data_ptr(): name for name, buffer in self.buffers.items()}
        self.mapped = set(BLOCKS)
        self.copies: dict[str, list[str]] = {"host": [], "gpu": []}
        self.registered, self.checked, self.pinned = [], [], []  # bytes by CUDA, its codes, bytes by torch
        self.emptied: list[set[str]] = []  # what was mapped when torch's cache was emptied
        self.pointer_to_data = {
            pointer: SimpleNamespace(handle=(0, size, pointer, 7), tag=tag, cpu_backup_tensor=None, is_asleep=False)
            for pointer, (tag, size) in zip(self.names, BLOCKS.values(), strict=True)
        }

    def cudaMemcpy(self, target: int, source: int, size: int) -> None:
        direction = "host" if source in self.names else "gpu"
        name = self.names[source if direction == "host" else target]
        assert name in self.mapped and size == BLOCKS[name][1]
        ctypes.memmove(target, source, size)
        self.copies[direction].append(name)

    def create_and_map(self, handle: tuple[int, int, int, int]) -> None:
        assert self.names[handle[2]] not in self.mapped
        self.mapped.add(self.names[handle[2]])

    def unmap_and_release(self, handle: tuple[int, int, int, int]) -> None:
        self.mapped.remove(self.names[handle[2]])
        self.buffers[self.names[handle[2]]].fill_(255)

    def host_register(self, pointer: int, size: int, flags: int) -> int:
        assert not pointer % PAGESIZE, "no page of a neighbour"
        self.registered.append(size)
        return 5

    def copied(self, direction: str) -> set[str]:
        """The blocks that were copied there since the last call, none of them twice."""
        names, self.copies[direction] = self.copies[direction], []
        assert len(set(names)) == len(names)
        return set(names)

    def asleep(self) -> set[str]:
        return {self.names[pointer] for pointer, data in self.pointer_to_data.items() if data.is_asleep}

    def values(self) -> dict[str, int]:
        """The value that fills each block; a block of several values is an error."""
        assert all((buffer == buffer[0]).all() for buffer in self.buffers.values())
        return {name: int(buffer[0]) for name, buffer in self.buffers.items()}


class FakeCuMemBackend:
    """vLLM's own, as far as it wakes (vllm/device_allocator/cumem.py)."""

    gpu: FakeGPU

    def __init__(self) -> None:
        self._state = "RUNNING"

    def resume(self, tags=None) -> None:
        for pointer, data in self.gpu.pointer_to_data.items():
            if tags is not None and data.tag not in tags:
                continue
            self.gpu.create_and_map(data.handle)
            data.is_asleep = False
            if data.cpu_backup_tensor is not None:
                self.gpu.cudaMemcpy(pointer, data.cpu_backup_tensor.data_ptr(), data.cpu_backup_tensor.numel())
                data.cpu_backup_tensor = None
        self._state = "RUNNING"


@pytest.fixture
def asleep(monkeypatch):
    """(fake GPU, the backend that `keep_weights_asleep` registers), found as vLLM finds it."""
    gpu, registry = FakeGPU(), {}
    names = ("", ".cumem", ".sleep_mode_backend")
    package, cumem, backends = (ModuleType(f"vllm.device_allocator{name}") for name in names)
    package.get_mem_allocator_instance = lambda: gpu
    cumem.libcudart, cumem.unmap_and_release = gpu, gpu.unmap_and_release
    backends.CuMemBackend = type("CuMemBackend", (FakeCuMemBackend,), {"gpu": gpu})
    register = lambda name, *path: registry.update({name: path})  # noqa: E731
    backends.SleepModeBackendFactory = SimpleNamespace(register_backend=register)
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
    yield gpu, getattr(module, class_name)()
    del sys.modules[path]  # it holds the fakes


def test_three_sleeps(asleep):
    """Large weights are copied to the host once, small ones, which are written in between, at every sleep, a cache
    never. All weights come back as they were when they slept; asleep nothing is mapped."""
    gpu, backend = asleep
    before = gpu.values()
    for value, copied in ((71, LARGE | SMALL), (72, SMALL), (73, SMALL)):
        backend.suspend(1)
        assert gpu.copied("host") == copied and set(gpu.values().values()) == {255}
        assert not gpu.mapped and gpu.asleep() == set(BLOCKS) and backend._state == "SUSPENDED"
        backend.resume()
        assert gpu.copied("gpu") == LARGE | SMALL and gpu.values() == before | dict.fromkeys(CACHE, 255)
        assert gpu.mapped == set(BLOCKS) and not gpu.asleep() and backend._state == "RUNNING"
        for name in SMALL:
            gpu.buffers[name].fill_(value)
            before[name] = value
    assert gpu.emptied == [set()] * 3, "once a sleep, when nothing is mapped any more"
    # Pinned: those that are kept once, in whole pages, and what CUDA returns is checked; the others by torch.
    assert sorted(gpu.registered) == [KEEP, 2 * KEEP] and gpu.checked == [5, 5]
    assert sorted(gpu.pinned) == sorted(3 * [BLOCKS[name][1] for name in SMALL])


def test_what_is_lent_stays_on_the_gpu(asleep):
    """From any sleep on; an address within the allocation names it, one of nothing is an error."""
    gpu, backend = asleep
    before, start = gpu.values(), {name: pointer for pointer, name in gpu.names.items()}
    lend = sys.modules[type(backend).__module__].lend
    for lent, address in (({"experts"}, KEEP - 1), ({"experts", "lora buffer"}, 0)):
        lend([start[max(lent)] + address])
        backend.suspend(1)
        assert gpu.mapped == lent and gpu.asleep() == set(BLOCKS) - lent
        backend.resume()
        assert gpu.mapped == set(BLOCKS) and gpu.values() == before | dict.fromkeys(CACHE, 255)
        assert not lent & (gpu.copied("host") | gpu.copied("gpu"))
    with pytest.raises(ValueError):
        lend([0])
    lend(None)
    backend.suspend(1)
    assert gpu.mapped == LARGE | SMALL and gpu.asleep() == CACHE and not gpu.copied("host"), "all weights stay"
    backend.resume()
    assert gpu.mapped == set(BLOCKS) and not gpu.copied("gpu")


def test_weights_that_are_written_are_smaller_than_those_that_are_kept(asleep):
    """Of gpt-oss-20b, in BF16: the largest that a weight sync writes, against the MXFP4 experts of one layer."""
    c = REAL_CONFIG
    qkv = c["hidden_size"] * (c["num_attention_heads"] + 2 * c["num_key_value_heads"]) * c["head_dim"] * 2
    experts = c["num_local_experts"] * c["intermediate_size"] * c["hidden_size"] // 2
    assert qkv < asleep[0].keep_bytes < experts
