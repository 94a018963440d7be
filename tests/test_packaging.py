"""The files that install the project: pinned, in step with each other, and valid."""

import os
import re
import shutil
import subprocess
import sys
import tomllib

import pytest
from conftest import ROOT
from machines import package_problems
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

SHELL_SCRIPTS = [*sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "scripts").rglob("*.sh")), ".ci/run"]
# vLLM pins the GPU set's torch and torch pins its triton, so these two may differ; nothing else may.
MAY_DIFFER = {"torch", "triton"}


def parse(lines):
    """Each requirement by its package's canonical name; none is stated twice."""
    stated = [Requirement(text) for line in lines if (text := line.split("#")[0].strip())]
    found = {canonicalize_name(requirement.name): requirement for requirement in stated}
    assert len(found) == len(stated)
    return found


SETUP = (ROOT / "scripts/setup.sh").read_text()
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
GPU, CPU = (parse((ROOT / name).read_text().splitlines()) for name in ("requirements.txt", "requirements-cpu.txt"))
VERL = parse((ROOT / "requirements-verl.txt").read_text().splitlines())
TOOLS = parse(PYPROJECT["dependency-groups"]["test"])


@pytest.mark.parametrize("found", [GPU, CPU, VERL, TOOLS])
def test_every_requirement_is_pinned(found):
    assert found
    for requirement in found.values():
        pins = [(part.operator, part.version) for part in requirement.specifier]
        assert len(pins) == 1 and pins[0][0] == "==" and "*" not in pins[0][1], requirement


def test_the_sets_are_in_step():
    common = GPU.keys() & CPU.keys()
    assert {"transformers", "trl", "peft", "accelerate", "datasets"} <= common
    assert {name for name in common if GPU[name].specifier != CPU[name].specifier} <= MAY_DIFFER
    assert not CPU.keys() & {"vllm", "kernels", "flash-attn"}
    assert "dependencies" not in PYPROJECT["project"] and not TOOLS.keys() & (GPU.keys() | CPU.keys())


def test_verls_set_differs_where_verl_holds_it_back():
    """verl 0.9.1 takes transformers below 5.11; the options of scripts/verl/ are those of its version."""
    version = re.search(r'^VERSION = "(.*)"$', (ROOT / "scripts/verl/run.py").read_text(), re.MULTILINE)[1]
    assert {name for name in GPU.keys() & VERL.keys() if GPU[name].specifier != VERL[name].specifier} == {
        "transformers"
    }
    assert VERL["verl"].specifier == SpecifierSet(f"=={version}")


@pytest.mark.parametrize("found", [GPU, CPU])
def test_the_pins_are_inside_the_tested_ranges(found):
    pins = {requirement.name: next(iter(requirement.specifier)).version for requirement in found.values()}
    assert not package_problems(pins, use_vllm="vllm" in pins)


def test_python_range_is_the_same_everywhere():
    accepted = re.search(r'^PYTHON_VERSIONS="([^"]*)"$', SETUP, re.MULTILINE)[1].split()
    stated = SpecifierSet(PYPROJECT["project"]["requires-python"])
    assert [f"3.{minor}" for minor in range(30) if f"3.{minor}" in stated] == accepted
    assert f"{sys.version_info[0]}.{sys.version_info[1]}" in accepted


def test_no_package_host_or_local_path_in_the_install_files():
    for name in ["requirements.txt", "requirements-cpu.txt", "requirements-verl.txt", "pyproject.toml", *SHELL_SCRIPTS]:
        text = (ROOT / name).read_text()
        assert not re.search(r"--(extra-)?index-url|--find-links|https?://|file://", text), name


@pytest.mark.parametrize("script", SHELL_SCRIPTS)
def test_shell_scripts_are_valid_and_strict(script):
    subprocess.run(["bash", "-n", str(ROOT / script)], check=True)
    assert "set -euo pipefail" in (ROOT / script).read_text().splitlines()


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder with setup.sh and what it reads."""
    monkeypatch.delenv("VENV", raising=False)
    (tmp_path / "scripts").mkdir()
    for name in ["scripts/setup.sh", "requirements.txt", "requirements-cpu.txt"]:
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def run_setup(folder, *arguments, **settings):
    """Runs setup.sh; a setting of None is taken out of the environment."""
    environment = {**os.environ, "PYTHON": sys.executable, **settings}
    environment = {name: value for name, value in environment.items() if value is not None}
    command = ["bash", str(folder / "scripts/setup.sh"), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def fake_command(folder, name, script):
    """Put a command into folder/bin; returns the PATH on which it comes first."""
    path = folder / "bin" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/usr/bin/env bash\n{script}\n")
    path.chmod(0o755)
    return f"{path.parent}{os.pathsep}{os.environ['PATH']}"


OLD_DRIVER = "echo 'NVIDIA H100 80GB HBM3, 570.86.15, 9.0'"


@pytest.mark.parametrize(
    ("nvidia_smi", "chosen", "warned"),
    [
        ("exit 9", "set: cpu, from requirements-cpu.txt", False),
        ("echo 'NVIDIA H100 80GB HBM3, 580.10, 9.0'", "set: gpu, from requirements.txt", False),
        (OLD_DRIVER, "set: gpu, from requirements.txt", True),
    ],
)
def test_setup_chooses_the_set_by_nvidia_smi_and_checks_the_driver(project, nvidia_smi, chosen, warned):
    done = run_setup(project, "--dry-run", PATH=fake_command(project, "nvidia-smi", nvidia_smi))
    # What follows depends on this machine (compiler, headers, disk); the choice does not.
    assert chosen in done.stdout and ("needs driver 580" in done.stderr) == warned
    assert not (project / ".venv").exists()


@pytest.mark.parametrize(
    ("libcuda", "allowed", "words"),
    [
        ("exit 1", None, "ERROR: the NVIDIA driver is 570.86.15"),
        ("echo 12080", "0", "ERROR: the NVIDIA driver is 570.86.15"),
        ("echo 13000", None, "forward compatibility"),
        ("exit 1", "1", "ALLOW_UNTESTED=1: it goes on"),
    ],
)
def test_setup_stops_at_an_old_driver_before_anything_is_made(project, libcuda, allowed, words):
    """Unless libcuda is of CUDA 13, or the user takes the risk. Without a GPU's libcuda the real question answers nothing."""
    fake_command(project, "nvidia-smi", OLD_DRIVER)
    asked = f'case "$*" in *cuDriverGetVersion*) {libcuda} ;; *) exec {sys.executable} "$@" ;; esac'
    settings = {"PATH": fake_command(project, "stub-python", asked), "PYTHON": "stub-python", "ALLOW_UNTESTED": allowed}
    done = run_setup(project, "--dry-run", **settings)
    stopped = "ERROR: the NVIDIA" in words
    assert words in done.stderr and ("ERROR: the NVIDIA" in done.stderr) == stopped
    assert not stopped or done.returncode == 4 and "disk:" not in done.stdout and not (project / ".venv").exists()


def test_setup_help_names_every_exit_code(project):
    done = run_setup(project, "--help")
    described = done.stdout.split("Exit codes:")[1]
    codes = {0, *map(int, re.findall(r"\bdie (\d)", SETUP))}
    assert done.returncode == 0 and not [code for code in codes if f"{code} " not in described]


BARE = f'case "$*" in *ensurepip*) exit 1 ;; esac; exec {sys.executable} "$@"'
OLD = dict.fromkeys(["python3", "python3.11", "python3.12", "python3.13"], "echo 3.8")
FULL_DISK = {"df": "printf 'head\\nfs 9 9 1000000 9%% /\\n'"}


@pytest.mark.parametrize(
    ("arguments", "settings", "commands", "code", "message"),
    [
        (["--nonsense"], {}, {}, 2, "unknown option"),
        (["--cpu", "--gpu"], {}, {}, 2, "exclude each other"),
        (["--cpu"], {"PYTHON": None}, OLD, 3, "apt install python3.12"),
        (["--cpu"], {"PYTHON": ""}, {}, 3, "PYTHON is set but empty"),
        (["--cpu"], {"PYTHON": "bare-python"}, {"bare-python": BARE}, 3, f"apt install python3.{sys.version_info[1]}-venv"),
        (["--cpu"], {}, FULL_DISK, 4, "not enough disk space"),
    ],
)  # fmt: skip
def test_setup_refuses_with_a_message(project, arguments, settings, commands, code, message):
    for name, script in commands.items():
        settings = settings | {"PATH": fake_command(project, name, script)}
    done = run_setup(project, *arguments, "--dry-run", **settings)
    assert (done.returncode, message in done.stderr) == (code, True), done.stderr


def test_setup_leaves_what_it_did_not_make_alone(project):
    """Neither a folder of the user's nor, unasked, the environment of the other set is replaced."""
    precious = project / "mine" / "precious.txt"
    precious.parent.mkdir()
    precious.write_text("kept")
    (project / ".venv").mkdir()
    (project / ".venv/.setup-stamp").write_text("gpu 0123\n")
    for extra, venv, words in [([], "mine", "not made by this"), (["--recreate"], "mine", "not made by this"), ([], None, "--recreate")]:  # fmt: skip
        done = run_setup(project, "--cpu", *extra, VENV=venv)
        assert done.returncode == 2 and words in done.stderr
    assert precious.read_text() == "kept"


# A Python that installs nothing: it notes what pip and uv are asked for in $ASKED, and fails where $FAIL says.
NO_PYTHON = """
case "$1 ${2:-}" in
    "-c "*) case "$2" in *version_info*) echo 3.12 ;; esac ;;
    "-m venv") mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
    "-m "*) echo "$2 ${*: -1}" >>"$ASKED"; ! [[ "$2 ${*: -1}" =~ ^($FAIL)$ ]] ;;
esac
"""
PLAIN = ["pip torch==T+cpu", "pip requirements-cpu.txt"]
BY_UV = ["pip torch==T+cpu", "pip uv==U", "uv torch==T", "pip requirements-cpu.txt"]


@pytest.mark.parametrize(
    ("fail", "expected", "code"),
    [
        ("", PLAIN, 0),
        (r"pip torch.*", BY_UV, 0),
        (r"pip torch.*|uv torch.*", BY_UV, 0),
        (r"pip torch.*|pip uv.*", [line for line in BY_UV if not line.startswith("uv")], 0),
        (r"pip requirements.*", PLAIN, 1),
    ],
)
def test_setup_looks_for_torchs_cpu_build_first(project, fail, expected, code):
    """Where pip has been told of it, then with uv; where there is none, it warns and takes what pip finds."""
    fake_command(project, "no-python", NO_PYTHON)
    asked = project / "asked.txt"
    settings = {"PYTHON": str(project / "bin/no-python"), "ASKED": str(asked)}
    done = run_setup(project, "--cpu", FAIL=fail, **settings)
    uv = re.search(r"^UV_VERSION=(.*)$", SETUP, re.MULTILINE)[1]
    wanted = [line.replace("==T", str(CPU["torch"].specifier)).replace("U", uv) for line in expected]
    assert (done.returncode, asked.read_text().splitlines()) == (code, wanted), done.stderr
    assert ("CUDA build" in done.stderr) == (fail.count("|") == 1)
    # What broke off is taken up by the next run; what is finished is left alone until the set changes.
    again = run_setup(project, "--cpu", FAIL="", **settings)
    assert again.returncode == 0 and ("nothing to do" in again.stdout) == (code == 0)
    with (project / "requirements-cpu.txt").open("a") as file:
        file.write("# changed\n")
    assert "nothing to do" not in run_setup(project, "--cpu", "--dry-run", **settings).stdout
    (project / ".venv/old").touch()
    assert run_setup(project, "--cpu", "--recreate", FAIL="", **settings).returncode == 0
    assert not (project / ".venv/old").exists() and (project / ".venv/bin/python").exists()
