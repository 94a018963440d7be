# SPDX-License-Identifier: Apache-2.0
"""Reads the machine and its installed packages, without importing anything heavy."""

import contextlib
import dataclasses
import importlib.metadata
import math
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from grpo.common import Problems, split_commas
from grpo.settings.table import Settings

GIB = 2**30
AMD_DEVICE = Path("/dev/kfd")  # Of the driver amdgpu.
# ATTN_IMPL -> (distribution, how to install it). Without it transformers falls back to a kernel whose backward pass
# ignores attention sinks (https://github.com/huggingface/transformers/pull/42736); see grpo/model/attention.py.
FLASH_PACKAGES = {
    "flash_attention_2": ("flash-attn", "build it from source"),
    "flash_attention_3": ("flash-attn-3", "build it from source, for Hopper cards"),
}
TRACKERS = ("none", "wandb", "tensorboard", "trackio")


@dataclass(frozen=True)
class Machine:
    """The hardware that a run can use; sizes are in GiB, and `gpus` is 0 on a CPU machine."""

    gpu: str = ""
    gpus: int = 0
    gpu_total: float = 0.0
    gpu_free: float = 0.0
    ram_free: float = 0.0
    cores: int = 1
    arch: str = ""
    capability: float = 0.0  # CUDA compute capability: 8.0 is Ampere, 9.0 Hopper, 10.0 Blackwell
    freest: str = "0"  # The number of the visible GPU that can train and has most memory free.
    ranks: int = 1  # Processes of the run.
    here: int = 1  # Processes of the run on this machine, which share its memory.
    gpu_limit: float | None = None  # GPU_MEM_LIMIT where less than that is free; `gpu_free` is then this.
    has_amd: bool = False  # Whether it has an AMD GPU and no visible NVIDIA one.
    is_planned: bool = False  # Whether it is not here yet: what is installed and free here says nothing of it.

    @property
    def no_gpu(self) -> str:
        """Why there is no GPU to use, as a clause."""
        if self.has_amd:
            return "the GPU here is AMD's, which is not supported, and no NVIDIA one is visible"
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")  # nvidia-smi finds no part of a GPU by its name, MIG-...
        return f"nvidia-smi shows no GPU for CUDA_VISIBLE_DEVICES={visible}" if visible else "no GPU is visible"

    @property
    def gpu_memory_text(self) -> str:
        """How much of the GPU's memory a run may take, as a clause."""
        if not self.gpu_total:  # Of a GPU that shares the host's memory, such as a GB10.
            return "nvidia-smi does not tell its memory"
        free = f"{self.gpu_free:.1f} of {self.gpu_total:.1f} GiB"
        return f"{free} are free" if self.gpu_limit is None else f"GPU_MEM_LIMIT allows {free}"

    def limited(self, limit: float | None) -> "Machine":
        """This machine with at most `limit` GiB of the GPU's memory free, and where this is unknown with so many; None
        is no limit."""
        is_unknown = self.gpus > 0 and not self.gpu_total
        if limit is None or (self.gpu_free <= limit and not is_unknown):
            return self
        return dataclasses.replace(self, gpu_free=limit, gpu_total=self.gpu_total or limit, gpu_limit=limit)

    @property
    def ram_share(self) -> float:
        """Free memory for each process of the run on this machine, in GiB."""
        return self.ram_free / self.here


# Distribution -> [oldest tested version, first untested one). tests/test_packaging.py holds the pins of both
# requirements files against this table. Hooks into TRL's internals (grpo/learn) are the reason for the narrow ranges.
TESTED = {
    "torch": ("2.11", "2.14"),
    "transformers": ("5.17", "5.18"),
    "trl": ("1.16", "1.17"),
    "peft": ("0.21", "0.22"),
    "accelerate": ("1.15", "1.16"),
    "datasets": ("5.2", "5.3"),
    "liger-kernel": ("0.8.5", "0.9"),
    "huggingface_hub": ("1.33", "1.34"),
}
TESTED_VLLM = {"vllm": ("0.26", "0.27")}  # Needed only where vLLM generates.


# By the controllers that /proc/self/cgroup names for a group of cgroup v2 and v1: the folder of these groups, the files
# of a group's limit and use, and the line of memory.stat that tells its reclaimable page cache.
CGROUPS = {
    "": ("", "memory.max", "memory.current", "inactive_file"),
    "memory": ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def cgroup_free(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> float:
    """GiB free below the memory limit of a container, or of a job or service on its host, reclaimable page cache
    included; without a limit inf, or more than any host has. psutil does not tell this: it reports the memory of the
    host. `own` names this process's groups, and each group above them may have a limit too; a container sees its own
    as the root."""
    free, groups = math.inf, dict[str, str]()
    with contextlib.suppress(OSError):
        groups = {names: path for _, names, path in (line.split(":", 2) for line in own.read_text().splitlines())}
    for controllers, (folder_name, limit_file, use_file, cache_line) in CGROUPS.items():
        lowest = root / folder_name / groups.get(controllers, "").lstrip("/")
        for folder in (lowest, *lowest.parents):
            with contextlib.suppress(OSError, ValueError, KeyError):
                limit = int((folder / limit_file).read_text())  # ValueError for "max", which is no limit.
                cached = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())[cache_line]
                free = min(free, max(0.0, (limit - int((folder / use_file).read_text()) + int(cached)) / GIB))
    return free


def read_machine() -> Machine:
    """Read this machine's free memory, its cores, and its visible GPUs with nvidia-smi. CUDA counts these in the same
    order from here on: by itself it begins with the fastest, and where there are two kinds of cards takes another."""
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    ram_free = 0.0
    with contextlib.suppress(ImportError):  # psutil comes with accelerate, whose absence `check_packages` reports.
        import psutil

        ram_free = min(psutil.virtual_memory().available / GIB, cgroup_free())
    machine = Machine(ram_free=ram_free, cores=os.cpu_count() or 1, arch=platform.machine())
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1"):
        return machine
    columns = "index,name,memory.total,memory.free,compute_cap"
    query = ["nvidia-smi", f"--query-gpu={columns}", "--format=csv,noheader,nounits"]
    query += [f"--id={visible}"] if visible else []
    with contextlib.suppress(OSError, subprocess.SubprocessError, ValueError):
        output = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
        rows = [[cell.strip() for cell in line.split(",")] for line in output.strip().splitlines()]
        _, name, total, free, capability = rows[0]
        machine = dataclasses.replace(machine, gpu=name, gpus=len(rows), capability=float(capability))
        machine = dataclasses.replace(machine, gpu_total=int(total) / 1024, gpu_free=int(free) / 1024)
        freest = max(rows, key=lambda row: (float(row[4]) >= 8, int(row[3])))
        machine = dataclasses.replace(machine, freest=freest[0])
    has_rocm = AMD_DEVICE.exists() or shutil.which("rocm-smi") is not None
    return dataclasses.replace(machine, has_amd=has_rocm and not machine.gpus)


def version_key(version: str) -> tuple[int, ...]:
    """The leading numbers of a version, for comparisons: 2.11.0+cu130 -> (2, 11, 0)."""
    return tuple(int(part) for part in re.findall(r"^[\d.]*", version)[0].split(".") if part)


def installed_versions(names: Iterable[str]) -> dict[str, str | None]:
    """Installed version of each distribution, None where it is missing. Imports nothing."""
    versions: dict[str, str | None] = dict.fromkeys(names)
    for name in versions:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


def check_packages(settings: Settings, versions: Mapping[str, str | None], problems: Problems, use_vllm: bool) -> None:
    """Checks that every package is installed in a tested version, and that the package of ATTN_IMPL is installed."""
    needed = TESTED | (TESTED_VLLM if use_vllm else {})
    if missing := [name for name in needed if versions.get(name) is None]:
        fix = "Run `bash scripts/setup.sh`, then `source .venv/bin/activate`"
        problems.add("packages", f"not installed for {sys.executable}: {', '.join(missing)}", fix)
    for name, (oldest, untested) in needed.items():
        if (version := versions.get(name)) is None:
            continue
        if name == "torch" and "+rocm" in version:  # It would take the AMD GPU for a CUDA device.
            fix = "Run `bash scripts/setup.sh` in a new environment: on an NVIDIA GPU, or with --cpu for MODEL_ID=tiny"
            problems.add(name, f"version {version} is built for AMD GPUs, which are not supported", fix)
        if not version_key(oldest) <= version_key(version) < version_key(untested) and not settings.ALLOW_UNTESTED:
            fix = "Run `bash scripts/setup.sh` for the tested set, or set ALLOW_UNTESTED=1"
            problems.add(name, f"version {version} is outside the tested range (from {oldest}, below {untested})", fix)
    attention = settings.ATTN_IMPL
    package, install = FLASH_PACKAGES.get(attention, ("", ""))
    if "/" in attention:
        package, install = "kernels", "bash scripts/setup.sh --gpu"
    if package and installed_versions([package])[package] is None:
        fix = f"Install it ({install}; docs/install.md#flashattention), or set ATTN_IMPL=auto"
        fix += ", which takes torch_flash: FlashAttention 2 as torch ships it, nothing to install"
        problems.add("ATTN_IMPL", f"{attention} needs the package {package}, which is not installed", fix)


def compiler_fault() -> str:
    """What Triton lacks to compile its launchers, a C compiler as triton/runtime/build.py looks for it or Python's
    headers, with a remedy; '' if it has both."""
    headers = Path(sysconfig.get_path("include"), "Python.h")
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "there is no gcc and no clang. Install one (apt install build-essential), or name another in CC"
    if not headers.exists():
        version = f"{sys.version_info[0]}.{sys.version_info[1]}"
        return f"{headers} is not there. Install Python's headers (apt install python{version}-dev)"
    return ""


def check_compiler(settings: Settings, machine: Machine, problems: Problems) -> None:
    """Checks that Triton can compile a launcher of each kernel: else a run would end minutes later, in its first step.
    ALLOW_UNTESTED trusts that Triton's cache holds all of them."""
    is_here = machine.gpus and not machine.is_planned
    if is_here and not settings.ALLOW_UNTESTED and (fault := compiler_fault()):
        fix = "Where an earlier run has filled Triton's cache, ALLOW_UNTESTED=1 does without"
        problems.add("compiler", f"Triton compiles a launcher of each kernel, and {fault}", fix)


def check_trackers(settings: Settings, problems: Problems) -> None:
    """Checks that the trackers of REPORT_TO are known and installed. Each has the name of its package. The setting's
    description and docs/report.md list them too."""
    for tracker in split_commas(settings.REPORT_TO):
        if tracker not in TRACKERS:
            problems.add("REPORT_TO", f"{tracker!r} is unknown", f"Use one of {', '.join(TRACKERS)}")
        elif tracker != "none" and installed_versions([tracker])[tracker] is None:
            problems.add("REPORT_TO", f"{tracker} is not installed", f"pip install {tracker}, or set REPORT_TO=none")
