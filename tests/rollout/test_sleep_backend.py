# SPDX-License-Identifier: Apache-2.0
"""The sleep backend on a GPU of host buffers."""

import ctypes
import importlib
import sys
from mmap import PAGESIZE
from types import SimpleNamespace

import pytest
import torch

from grpo.plan.hub import REAL_CONFIG
from grpo.rollout.vllm_patches import keep_weights_asleep

KEEP = PAGESIZE  # bytes, in place of KEEP_BYTES
BLOCKS = {  # name: (tag, bytes)
    "experts": ("weights", KEEP),
    "embedding": ("weights", KEEP + 100),
    "qkv_proj": ("weights", KEEP - 1),
    "cache": ("kv_cache", 2 * KEEP),
}


class FakeGPU:
    """Blocks as vLLM's allocator lists them, each a host buffer. A block that is unmapped loses what it held, and as on
    a GPU neither a copy nor a second unmapping may touch it."""

    def __init__(self) -> None:
        self.buffers = {n: torch.full((size,), i, dtype=torch.uint8) for i, (n, (_, size)) in enumerate(BLOCKS.items())}
        self.names = {buffer.data_ptr(): name for name, buffer in self.buffers.items()}
        self.mapped, self.copied, self.pinned = set(BLOCKS), [], []
        self.pointer_to_data = {
            pointer: SimpleNamespace(handle=(0, size, pointer, 7), tag=tag, cpu_backup_tensor=None, is_asleep=False)
            for pointer, (tag, size) in zip(self.names, BLOCKS.values(), strict=True)
        }

    def cudaMemcpy(self, target: int, source: int, size: int) -> None:
        name = self.names.get(source) or self.names[target]
        assert name in self.mapped and size == BLOCKS[name][1]
        ctypes.memmove(target, source, size)
        self.copied.append(name)

    def unmap(self, handle: tuple[int, int, int, int]) -> None:
        self.mapped.remove(self.names[handle[2]])
        self.buffers[self.names[handle[2]]].fill_(255)

    def wake(self, tags: list[str]) -> None:
        """As vLLM's allocator does (vllm/device_allocator/cumem.py)."""
        for pointer, data in self.pointer_to_data.items():
            if data.tag in tags:
                assert self.names[pointer] not in self.mapped
                self.mapped.add(self.names[pointer])
                data.is_asleep = False
                if data.cpu_backup_tensor is not None:
                    self.cudaMemcpy(pointer, data.cpu_backup_tensor.data_ptr(), data.cpu_backup_tensor.numel())
                    data.cpu_backup_tensor = None

    def host_register(self, pointer: int, size: int, flags: int) -> int:
        assert not pointer % PAGESIZE, "no page of a neighbour"
        self.pinned.append(size)
        return 5

    def values(self) -> dict[str, list[int]]:
        return {name: buffer.unique().tolist() for name, buffer in self.buffers.items()}


@pytest.fixture
def asleep(monkeypatch):
    """(fake GPU, the backend that `keep_weights_asleep` registers, its module), found as vLLM finds it."""
    gpu, registry = FakeGPU(), {}
    own = type("CuMemBackend", (), {"resume": lambda self, tags: gpu.wake(tags)})
    factory = SimpleNamespace(register_backend=lambda name, *path: registry.update({name: path}))
    for name, module in {
        "": SimpleNamespace(get_mem_allocator_instance=lambda: gpu),
        ".cumem": SimpleNamespace(libcudart=gpu, unmap_and_release=gpu.unmap),
        ".sleep_mode_backend": SimpleNamespace(CuMemBackend=own, SleepModeBackendFactory=factory),
    }.items():
        monkeypatch.setitem(sys.modules, f"vllm.device_allocator{name}", module)
    empty = torch.empty
    pinned = lambda size, dtype, pin_memory: gpu.pinned.append(size) or empty(size, dtype=dtype)  # noqa: E731
    monkeypatch.setattr(torch, "empty", pinned)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=gpu.host_register))
    monkeypatch.setattr(torch.cuda, "check_error", gpu.pinned.append)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: gpu.copied.append(f"emptied with {len(gpu.mapped)} mapped"))
    config = SimpleNamespace(sleep_mode_backend="cumem")
    keep_weights_asleep(SimpleNamespace(llm_engine=SimpleNamespace(vllm_config=SimpleNamespace(model_config=config))))
    path, class_name = registry[config.sleep_mode_backend]
    module = importlib.import_module(path)
    # Of gpt-oss-20b, in BF16: the largest that a weight sync writes, and the MXFP4 experts of one layer.
    c = REAL_CONFIG
    qkv = c["hidden_size"] * (c["num_attention_heads"] + 2 * c["num_key_value_heads"]) * c["head_dim"] * 2
    assert qkv < module.KEEP_BYTES < c["num_local_experts"] * c["intermediate_size"] * c["hidden_size"] // 2
    monkeypatch.setattr(module, "KEEP_BYTES", KEEP)
    yield gpu, getattr(module, class_name)(), module
    del sys.modules[path]  # it holds the fakes


def test_three_sleeps(asleep):
    """Large weights are copied to the host once, small ones, which are written in between, at every sleep, a cache
    never. All weights come back as they were when they slept; asleep nothing is mapped."""
    gpu, backend, _ = asleep
    before = gpu.values() | {"cache": [255]}
    for value, copied in ((71, ["experts", "embedding", "qkv_proj"]), (72, ["qkv_proj"]), (73, ["qkv_proj"])):
        backend.suspend(1)
        assert gpu.copied == [*copied, "emptied with 0 mapped"]
        gpu.copied.clear()
        backend.resume()
        assert gpu.copied == ["experts", "embedding", "qkv_proj"] and gpu.values() == before
        gpu.copied.clear()
        gpu.buffers["qkv_proj"].fill_(value)
        before["qkv_proj"] = [value]
    with pytest.raises(ValueError, match="level 1 only"):
        backend.suspend(2)
    # What is kept is pinned in whole pages, and what CUDA returns is checked; the rest is pinned by torch.
    assert gpu.pinned == [KEEP, 5, 2 * KEEP, 5, *[KEEP - 1] * 3]


def test_what_is_lent_stays_on_the_gpu(asleep):
    """From any sleep on; an address within the allocation names it, one of nothing is an error."""
    gpu, backend, module = asleep
    before, start = gpu.values() | {"cache": [255]}, {name: pointer for pointer, name in gpu.names.items()}
    for lent, address in (({"experts"}, start["experts"] + KEEP - 1), ({"experts", "qkv_proj"}, start["qkv_proj"])):
        module.lend([address])
        backend.suspend(1)
        assert gpu.mapped == lent
        backend.resume()
        assert gpu.mapped == set(BLOCKS) and gpu.values() == before and not lent & set(gpu.copied)
        gpu.copied.clear()
    with pytest.raises(ValueError):
        module.lend([0])
    module.lend(None)
    backend.suspend(1)
    assert gpu.mapped == set(BLOCKS) - {"cache"} and gpu.copied == ["emptied with 3 mapped"], "all weights stay"
