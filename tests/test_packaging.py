"""The files that install the project: pinned, in step with each other, and valid."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
SHELL_SCRIPTS = [*sorted(f"scripts/{path.name}" for path in (ROOT / "scripts").glob("*.sh")), ".ci/run"]
TOP_LEVEL = {
    "LICENSE",
    "README.md",
    "data",
    "docs",
    "pyproject.toml",
    "requirements-cpu.txt",
    "requirements.txt",
    "rewards.py",
    "scripts",
    "tests",
    "grpo",
    "train_grpo.py",
}
# vLLM pins the GPU set's torch and torch pins its triton, so these two may differ; nothing else may.
MAY_DIFFER = {"torch", "triton"}


def parse(lines):
    """Map each package's canonical name to its requirement; a package stated twice is an error."""
    found = {}
    for line in lines:
        text = line.split("#")[0].strip()
        if text:
            requirement = Requirement(text)
            name = canonicalize_name(requirement.name)
            assert name not in found, f"{name} is stated twice"
            found[name] = requirement
    return found


def requirements(name):
    return parse((ROOT / name).read_text().splitlines())


def pyproject():
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_tools():
    return parse(pyproject()["dependency-groups"]["test"])


test_tools.__test__ = False  # a helper with an unlucky name

STATED = {
    "requirements.txt": lambda: requirements("requirements.txt"),
    "requirements-cpu.txt": lambda: requirements("requirements-cpu.txt"),
    "pyproject.toml": test_tools,
}


@pytest.mark.parametrize("source", STATED)
def test_every_requirement_is_pinned(source):
    found = STATED[source]()
    assert found
    for name, requirement in found.items():
        pins = [(part.operator, part.version) for part in requirement.specifier]
        assert len(pins) == 1 and pins[0][0] == "==" and "*" not in pins[0][1], f"{name} in {source}: {requirement}"


def test_both_sets_state_the_same_versions():
    gpu, cpu = requirements("requirements.txt"), requirements("requirements-cpu.txt")
    common = gpu.keys() & cpu.keys()
    assert {"transformers", "trl", "peft", "accelerate", "datasets"} <= common
    differing = {name for name in common if gpu[name].specifier != cpu[name].specifier}
    assert differing <= MAY_DIFFER


def test_gpu_only_packages_stay_out_of_the_cpu_set():
    cpu = requirements("requirements-cpu.txt")
    assert not cpu.keys() & {"vllm", "kernels", "flash-attn"}


def test_pyproject_repeats_no_requirement():
    assert "dependencies" not in pyproject()["project"]
    elsewhere = requirements("requirements.txt").keys() | requirements("requirements-cpu.txt").keys()
    assert not test_tools().keys() & elsewhere


def test_flash_attn_is_optional_and_pinned_once():
    text = (ROOT / "requirements.txt").read_text()
    assert len(re.findall(r"^# optional: flash-attn==\d\S*$", text, re.MULTILINE)) == 1
    assert "flash-attn" not in requirements("requirements.txt")


def test_python_range_is_the_same_everywhere():
    script = (ROOT / "scripts/setup.sh").read_text()
    accepted = re.search(r'^PYTHON_VERSIONS="([^"]*)"$', script, re.MULTILINE)[1].split()
    stated = SpecifierSet(pyproject()["project"]["requires-python"])
    assert [f"3.{minor}" for minor in range(30) if f"3.{minor}" in stated] == accepted
    assert f"{sys.version_info[0]}.{sys.version_info[1]}" in accepted


def test_no_package_host_or_local_path_in_the_install_files():
    for name in ["requirements.txt", "requirements-cpu.txt", "pyproject.toml", *SHELL_SCRIPTS]:
        text = (ROOT / name).read_text()
        assert not re.search(r"--(extra-)?index-url|--find-links|https?://|file://", text), name


@pytest.mark.parametrize("script", SHELL_SCRIPTS)
def test_shell_scripts_are_valid_and_strict(script):
    subprocess.run(["bash", "-n", str(ROOT / script)], check=True)
    assert "set -euo pipefail" in (ROOT / script).read_text().splitlines()


def test_top_level_holds_only_what_it_should():
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listed = subprocess.run(["git", "-C", str(ROOT), "ls-files"], capture_output=True, text=True)
    if listed.returncode or not listed.stdout:
        pytest.skip("git lists no files here")
    top = {line.split("/")[0] for line in listed.stdout.splitlines()}
    assert {name for name in top if not name.startswith(".")} <= TOP_LEVEL


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder with setup.sh and what it reads."""
    monkeypatch.delenv("VENV", raising=False)
    (tmp_path / "scripts").mkdir()
    for name in ["scripts/setup.sh", "requirements.txt", "requirements-cpu.txt"]:
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def run_setup(folder, *arguments, **settings):
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


@pytest.mark.parametrize(
    ("nvidia_smi", "chosen", "warned"),
    [
        ("exit 9", "set: cpu, from requirements-cpu.txt", False),
        ("echo 'NVIDIA H100 80GB HBM3, 580.10, 9.0'", "set: gpu, from requirements.txt", False),
        ("echo 'NVIDIA H100 80GB HBM3, 570.86.15, 9.0'", "set: gpu, from requirements.txt", True),
    ],
)
def test_setup_chooses_the_set_by_nvidia_smi_and_checks_the_driver(project, nvidia_smi, chosen, warned):
    done = run_setup(project, "--dry-run", PATH=fake_command(project, "nvidia-smi", nvidia_smi))
    # What follows depends on this machine (compiler, headers, disk); the choice does not.
    assert chosen in done.stdout
    assert ("needs driver 580" in done.stderr) == warned
    assert not (project / ".venv").exists()


def test_setup_help_names_every_exit_code(project):
    done = run_setup(project, "--help")
    assert done.returncode == 0
    script = (project / "scripts/setup.sh").read_text()
    described = done.stdout.split("Exit codes:")[1]
    for code in {0, *map(int, re.findall(r"\bdie (\d)", script))}:
        assert f"{code} " in described


@pytest.mark.parametrize(
    ("arguments", "settings", "code", "message"),
    [
        (["--nonsense"], {}, 2, "unknown option"),
        (["--cpu", "--gpu"], {}, 2, "exclude each other"),
        (["--cpu", "--flash-attn"], {}, 2, "needs the GPU set"),
        (["--cpu"], {"PYTHON": "/nonexistent/python"}, 3, "tried: /nonexistent/python"),
    ],
)
def test_setup_refuses_with_a_message(project, arguments, settings, code, message):
    done = run_setup(project, *arguments, "--dry-run", **settings)
    assert (done.returncode, message in done.stderr) == (code, True), done.stderr


def test_setup_names_what_to_install_where_no_python_fits(project):
    for name in ["python3", "python3.11", "python3.12", "python3.13"]:
        path = fake_command(project, name, "echo 3.8")
    done = run_setup(project, "--cpu", "--dry-run", PATH=path, PYTHON=None)
    assert done.returncode == 3
    assert "apt install python3.12" in done.stderr


def test_setup_names_the_package_where_ensurepip_is_missing(project):
    fake_command(project, "bare-python", f'case "$*" in *ensurepip*) exit 1 ;; esac; exec {sys.executable} "$@"')
    done = run_setup(project, "--cpu", "--dry-run", PYTHON=str(project / "bin/bare-python"))
    assert done.returncode == 3
    assert f"apt install python3.{sys.version_info[1]}-venv" in done.stderr


def test_setup_stops_where_the_disk_is_full(project):
    path = fake_command(project, "df", "printf 'head\\nfs 9 9 1000000 9%% /\\n'")
    done = run_setup(project, "--cpu", "--dry-run", PATH=path)
    assert done.returncode == 4
    assert "not enough disk space" in done.stderr


def test_setup_leaves_a_folder_it_did_not_make_alone(project):
    precious = project / "mine" / "precious.txt"
    precious.parent.mkdir()
    precious.write_text("kept")
    for extra in [[], ["--recreate"]]:
        done = run_setup(project, "--cpu", *extra, VENV="mine")
        assert done.returncode == 2
        assert "was not made by this script" in done.stderr
    assert precious.read_text() == "kept"


def test_setup_does_not_replace_the_other_set_unasked(project):
    (project / ".venv").mkdir()
    (project / ".venv/.setup-stamp").write_text("gpu 0123\n")
    done = run_setup(project, "--cpu")
    assert done.returncode == 2
    assert "--recreate" in done.stderr


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
    torch = requirements("requirements-cpu.txt")["torch"].specifier
    uv = re.search(r"^UV_VERSION=(.*)$", (ROOT / "scripts/setup.sh").read_text(), re.MULTILINE)[1]
    wanted = [line.replace("==T", str(torch)).replace("U", uv) for line in expected]
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
