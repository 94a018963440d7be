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
SHELL_SCRIPTS = ["scripts/demo.sh", "scripts/setup.sh", "scripts/test.sh", ".ci/run"]
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
    path = ROOT / script
    subprocess.run(["bash", "-n", str(path)], check=True)
    lines = path.read_text().splitlines()
    assert lines[0] == "#!/usr/bin/env bash"
    assert "set -euo pipefail" in lines[:6]


def test_every_shell_script_is_listed_here():
    assert {f"scripts/{path.name}" for path in (ROOT / "scripts").glob("*.sh")} <= set(SHELL_SCRIPTS)


def test_license_is_apache_2():
    assert pyproject()["project"]["license"] == "Apache-2.0"
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text and "Version 2.0, January 2004" in text and "END OF TERMS AND CONDITIONS" in text


def test_top_level_holds_only_what_it_should():
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listed = subprocess.run(["git", "-C", str(ROOT), "ls-files"], capture_output=True, text=True)
    if listed.returncode or not listed.stdout:
        pytest.skip("git lists no files here")
    top = {line.split("/")[0] for line in listed.stdout.splitlines()}
    assert {name for name in top if not name.startswith(".")} <= TOP_LEVEL


def copy_of_setup(folder):
    (folder / "scripts").mkdir()
    for name in ["scripts/setup.sh", "requirements.txt", "requirements-cpu.txt"]:
        shutil.copy(ROOT / name, folder / name)


def run_setup(folder, *arguments, **settings):
    environment = {**os.environ, "PYTHON": sys.executable, **settings}
    environment = {name: value for name, value in environment.items() if value is not None}
    command = ["bash", str(folder / "scripts/setup.sh"), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


@pytest.fixture
def project(tmp_path, monkeypatch):
    monkeypatch.delenv("VENV", raising=False)
    copy_of_setup(tmp_path)
    return tmp_path


def fake_command(folder, name, script):
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/usr/bin/env bash\n{script}\n")
    path.chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


def test_setup_prints_its_decisions_and_makes_nothing_in_a_dry_run(project):
    done = run_setup(project, "--cpu", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "set: cpu, from requirements-cpu.txt (--cpu was given)" in done.stdout
    assert "python:" in done.stdout and "disk:" in done.stdout
    assert not (project / ".venv").exists()


def test_setup_takes_the_cpu_set_where_nvidia_smi_fails(project):
    path = fake_command(project / "bin", "nvidia-smi", "exit 9")
    done = run_setup(project, "--dry-run", PATH=path)
    assert done.returncode == 0, done.stderr
    assert "set: cpu" in done.stdout


def test_setup_takes_the_gpu_set_where_nvidia_smi_works(project):
    path = fake_command(project / "bin", "nvidia-smi", 'echo "NVIDIA H100 80GB HBM3, 580.10, 9.0"')
    done = run_setup(project, "--dry-run", PATH=path)
    # What follows depends on this machine (compiler, headers, disk); the choice does not.
    assert "set: gpu, from requirements.txt (nvidia-smi reports NVIDIA H100" in done.stdout


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
        (["--cpu"], {"PYTHON": "/nonexistent/python"}, 3, "does not run"),
    ],
)
def test_setup_refuses_with_a_message(project, arguments, settings, code, message):
    done = run_setup(project, *arguments, "--dry-run", **settings)
    assert (done.returncode, message in done.stderr) == (code, True), done.stderr


def test_setup_names_what_to_install_where_no_python_fits(project):
    path = project / "bin"
    for name in ["python3", "python3.11", "python3.12", "python3.13"]:
        fake_command(path, name, "echo 3.8")
    done = run_setup(project, "--cpu", "--dry-run", PATH=f"{path}{os.pathsep}{os.environ['PATH']}", PYTHON=None)
    assert done.returncode == 3
    assert "apt install python3.12" in done.stderr


def test_setup_names_the_package_where_ensurepip_is_missing(project):
    script = f'case "$*" in *ensurepip*) exit 1 ;; esac; exec {sys.executable} "$@"'
    fake_command(project / "bin", "bare-python", script)
    done = run_setup(project, "--cpu", "--dry-run", PYTHON=str(project / "bin/bare-python"))
    assert done.returncode == 3
    assert f"apt install python3.{sys.version_info[1]}-venv" in done.stderr


def test_setup_stops_where_the_disk_is_full(project):
    path = fake_command(project / "bin", "df", "printf 'head\\nfs 9 9 1000000 9%% /\\n'")
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


def test_a_second_setup_has_nothing_to_do(project):
    binaries = project / ".venv/bin"
    binaries.mkdir(parents=True)
    (binaries / "python").symlink_to(sys.executable)
    digest = subprocess.run(
        ["sha256sum", "requirements-cpu.txt"], cwd=project, capture_output=True, text=True, check=True
    ).stdout.split()[0]
    (project / ".venv/.setup-stamp").write_text(f"cpu {digest}\n")
    done = run_setup(project, "--cpu")
    assert done.returncode == 0 and "nothing to do" in done.stdout
    with (project / "requirements-cpu.txt").open("a") as file:
        file.write("# changed\n")
    assert "nothing to do" not in run_setup(project, "--cpu", "--dry-run").stdout
