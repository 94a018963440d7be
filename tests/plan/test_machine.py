# SPDX-License-Identifier: Apache-2.0
"""The machine, its packages and trackers."""

import dataclasses
import math
import os
import types

import psutil
import pytest
from helpers import write_commands
from machines import CPU, GOOD_VERSIONS, H100, only, package_problems

from grpo.common import Problems
from grpo.plan import machine
from grpo.plan.machine import compiler_fault
from grpo.settings.table import Settings


def test_the_gpu_that_nvidia_smi_shows(monkeypatch, claimed_gpu):
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    for name, value in claimed_gpu.items():
        monkeypatch.setenv(name, value)
    gpu = machine.read_machine()
    assert (gpu.gpu, gpu.gpus, gpu.capability) == ("NVIDIA H100 80GB HBM3", 1, 9.0)
    assert (gpu.gpu_total, gpu.gpu_free) == (81559 / 1024, 79.0)
    assert os.environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID", "CUDA's first card is nvidia-smi's first"
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    assert machine.read_machine().gpu == gpu.gpu and os.environ["CUDA_DEVICE_ORDER"] == "FASTEST_FIRST"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert machine.read_machine().gpus == 0


def test_what_nvidia_smi_does_not_tell_is_named(monkeypatch, tmp_path):
    """Of a part of a GPU (MIG), which it does not find by its name, and of a GPU that has no memory of its own."""
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    write_commands(tmp_path, {"nvidia-smi": "echo No devices were found; exit 6"})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-1f2e")
    assert machine.read_machine().no_gpu == "nvidia-smi shows no GPU for CUDA_VISIBLE_DEVICES=MIG-1f2e"
    write_commands(tmp_path, {"nvidia-smi": "echo '0, NVIDIA GB10, [N/A], [N/A], 12.1'"})
    gpu = machine.read_machine()
    assert (gpu.gpu, gpu.gpus) == ("NVIDIA GB10", 1) and gpu.gpu_memory_text == "nvidia-smi does not tell its memory"
    assert gpu.limited(39.0).gpu_memory_text == "GPU_MEM_LIMIT allows 39.0 of 39.0 GiB"
    assert CPU.limited(39.0) == CPU and dataclasses.replace(H100, gpu_free=0.0).limited(39.0).gpu_free == 0


def test_the_gpu_that_is_proposed_can_train_and_has_most_memory_free(monkeypatch, tmp_path):
    """Others may be in use, or too old."""
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    cards = ["2, NVIDIA H100, 81559, 900, 9.0", "3, Tesla V100, 32768, 32000, 7.0", "5, NVIDIA L4, 23034, 22565, 8.9"]
    write_commands(tmp_path, {"nvidia-smi": "".join(f"echo '{card}'\n" for card in cards)})
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3,5")
    gpu = machine.read_machine()
    assert (gpu.gpu, gpu.gpus, gpu.freest) == ("NVIDIA H100", 3, "5")


@pytest.mark.parametrize("sign", ["device", "tool"])
def test_an_amd_gpu_is_called_by_its_name(monkeypatch, tmp_path, sign, claimed_gpu):
    """Where no NVIDIA GPU is visible, and unless CUDA_VISIBLE_DEVICES asks for the CPU."""
    monkeypatch.setenv("PATH", str(tmp_path))  # No nvidia-smi.
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(machine, "AMD_DEVICE", tmp_path / "kfd")
    assert not machine.read_machine().has_amd and machine.read_machine().no_gpu == "no GPU is visible"
    if sign == "device":
        (tmp_path / "kfd").touch()
    else:
        write_commands(tmp_path, {"rocm-smi": "exit 0"})
    assert machine.read_machine().has_amd and "AMD's, which is not supported" in machine.read_machine().no_gpu
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert not machine.read_machine().has_amd
    for name, value in claimed_gpu.items():
        monkeypatch.setenv(name, value)
    assert machine.read_machine().gpus and not machine.read_machine().has_amd


def test_a_container_has_the_memory_of_its_limit(tmp_path, monkeypatch):
    assert machine.cgroup_free(tmp_path) == math.inf
    (tmp_path / "memory.current").write_text(f"{3 * 2**30}\n")
    (tmp_path / "memory.stat").write_text(f"anon 5\ninactive_file {2**30}\n")
    for limit, free in (("max", math.inf), (10 * 2**30, 8.0)):
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        assert machine.cgroup_free(tmp_path) == free
    monkeypatch.setattr(psutil, "virtual_memory", lambda: types.SimpleNamespace(available=2 * 2**30))
    for limit, free in ((1.0, 1.0), (math.inf, 2.0)):
        monkeypatch.setattr("grpo.plan.machine.cgroup_free", lambda limit=limit: limit)
        assert machine.read_machine().ram_free == free


def test_a_job_has_the_memory_of_its_limit(tmp_path):
    """As of Slurm, which limits the job, a step or both, and of systemd."""
    own, step = tmp_path / "own", tmp_path / "system.slice/job_7/step_0"
    own.write_text("1:name=old:/\n0::/system.slice/job_7/step_0/user\n")
    step.mkdir(parents=True)
    for folder, limit in ((step, "max"), (step.parent, 10 * 2**30)):
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text(f"{3 * 2**30}\n")
        (folder / "memory.stat").write_text(f"anon 5\ninactive_file {2**30}\n")
    assert machine.cgroup_free(tmp_path, own) == 8.0
    (step / "memory.max").write_text(f"{5 * 2**30}\n")
    assert machine.cgroup_free(tmp_path, own) == 3.0
    own.write_text("0::/../../elsewhere\n")
    assert machine.cgroup_free(tmp_path, own) == math.inf, "of a container that sees its host's path"


def test_a_limit_of_cgroup_v1_counts_too(tmp_path):
    """A container sees the path on its host, which is not there, and its own group as the root."""
    own, top = tmp_path / "own", tmp_path / "memory"
    own.write_text("9:name=systemd:/job\n4:memory:/job/step\n3:cpuset:/\n0::/\n")
    (step := top / "job" / "step").mkdir(parents=True)
    for folder, limit in ((top, 2**63 - 4096), (step.parent, 10 * 2**30)):
        (folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
        (folder / "memory.usage_in_bytes").write_text(f"{3 * 2**30}\n")
        (folder / "memory.stat").write_text(f"inactive_file 5\ntotal_inactive_file {2**30}\n")
    assert machine.cgroup_free(tmp_path, own) == 8.0
    own.write_text("4:memory:/docker/0123\n")
    assert machine.cgroup_free(tmp_path, own) > 2**30, "no limit"
    (top / "memory.limit_in_bytes").write_text(f"{5 * 2**30}\n")
    assert machine.cgroup_free(tmp_path, own) == 3.0


def test_packages():
    assert not package_problems(GOOD_VERSIONS)
    missing = package_problems(GOOD_VERSIONS | {"torch": None, "trl": None})
    assert only(missing).startswith("packages: not installed for ") and ": torch, trl. Run `bash" in only(missing)
    for name, version, limits in (("trl", "1.15.9", "1.16, below 1.17"), ("vllm", "0.27.0", "0.26, below 0.27")):
        problem = only(package_problems(GOOD_VERSIONS | {name: version}, True))
        assert f"{name}: version {version} is outside the tested range (from {limits})" in problem
        assert not package_problems(GOOD_VERSIONS | {name: version}, True, ALLOW_UNTESTED=True)
    assert not package_problems(GOOD_VERSIONS | {"torch": "2.11.0+cu130"})
    problem = only(package_problems(GOOD_VERSIONS | {"torch": "2.11.0+rocm7.1"}, ALLOW_UNTESTED=True))
    assert "torch: version 2.11.0+rocm7.1 is built for AMD GPUs, which are not supported. Run `bash scr" in problem
    assert not package_problems(GOOD_VERSIONS | {"vllm": None}), "only where vLLM generates"
    assert not package_problems(machine.installed_versions(machine.TESTED)), "this environment"


def test_attention_needs_its_package():
    for attention, (package, _) in (machine.FLASH_PACKAGES | {"org/kernel": ("kernels", "")}).items():
        problem = only(package_problems(GOOD_VERSIONS, ATTN_IMPL=attention))
        assert f"{attention} needs the package {package}, which is not installed" in problem
        assert "or set ATTN_IMPL=auto, which takes torch_flash" in problem


@pytest.mark.parametrize(("tools", "cc", "fault"), [
    ([], None, "no gcc and no clang"), (["clang"], None, ""), (["gcc"], None, ""), ([], "/opt/cc", ""),
])  # fmt: skip
def test_triton_needs_a_compiler_and_pythons_headers(monkeypatch, tmp_path, tools, cc, fault):
    monkeypatch.setenv("PATH", str(write_commands(tmp_path, dict.fromkeys(tools, "exit 0"))))
    monkeypatch.delenv("CC", raising=False)
    if cc:
        monkeypatch.setenv("CC", cc)
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    assert fault in compiler_fault() and ("Python.h is not there" in compiler_fault()) == (not fault)
    (tmp_path / "Python.h").touch()
    assert bool(compiler_fault()) == bool(fault)
    monkeypatch.setattr(machine, "compiler_fault", compiler_fault)
    rented = dataclasses.replace(H100, is_planned=True)  # What is installed here says nothing of it.
    cases = ((H100, {}, fault), (H100, {"ALLOW_UNTESTED": True}, ""), (CPU, {}, ""), (rented, {}, ""))
    for gpu, changes, refused in cases:
        problems = Problems()
        machine.check_compiler(Settings(**changes), gpu, problems)
        assert len(problems) == bool(refused) and all(problem.startswith("compiler: ") for problem in problems)


def test_trackers_are_known_and_installed(monkeypatch):
    monkeypatch.setattr("grpo.plan.machine.installed_versions", lambda names: dict.fromkeys(names))
    for trackers, words in (("oddity", "is unknown"), ("tensorboard, none", "is not installed")):
        machine.check_trackers(Settings(REPORT_TO=trackers), problems := Problems())
        assert words in only(problems)
