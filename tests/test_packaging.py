# SPDX-License-Identifier: Apache-2.0
"""The files that install the project: pinned, in step with each other, and valid."""

import os
import re
import shutil
import subprocess
import sys
import tomllib

import pytest
from helpers import ROOT, write_commands
from machines import package_problems
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

SHELL_SCRIPTS = [*sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "scripts").rglob("*.sh")), ".ci/run"]
SETUP = (ROOT / "scripts/setup.sh").read_text()
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def parse(lines):
    """Each requirement by its package's canonical name; none is stated twice."""
    stated = [Requirement(text) for line in lines if (text := line.split("#")[0].strip())]
    by_name = {canonicalize_name(requirement.name): requirement for requirement in stated}
    assert len(by_name) == len(stated)
    return by_name


FILES = ["requirements.txt", "requirements-cpu.txt", "requirements-verl.txt"]
GPU, CPU, VERL = (parse((ROOT / name).read_text().splitlines()) for name in FILES)
TOOLS = parse(PYPROJECT["dependency-groups"]["test"])


def test_every_requirement_is_pinned():
    for requirement in (requirement for group in (GPU, CPU, VERL, TOOLS) for requirement in group.values()):
        pins = [(part.operator, part.version) for part in requirement.specifier]
        assert len(pins) == 1 and pins[0][0] == "==" and "*" not in pins[0][1], requirement


def different(one_set, other_set):
    """The packages of both sets whose versions differ."""
    return {name for name in one_set.keys() & other_set.keys() if one_set[name].specifier != other_set[name].specifier}


def test_the_sets_are_in_step():
    assert {"transformers", "trl", "peft"} <= GPU.keys() & CPU.keys()
    assert different(GPU, CPU) <= {"torch", "triton"}, "vLLM pins the GPU set's torch, and torch pins its triton"
    assert different(GPU, VERL) == {"transformers"}, "verl 0.9.1 takes transformers below 5.11"
    version = re.search(r'^VERSION = "(.*)"$', (ROOT / "scripts/verl/run.py").read_text(), re.MULTILINE)[1]
    assert VERL["verl"].specifier == SpecifierSet(f"=={version}"), "the options of scripts/verl/ are this version's"
    assert not TOOLS.keys() & (GPU.keys() | CPU.keys())


def test_the_pins_are_inside_the_tested_ranges_and_so_is_the_python_range():
    for requirements in (GPU, CPU):
        pins = {requirement.name: next(iter(requirement.specifier)).version for requirement in requirements.values()}
        assert not package_problems(pins, use_vllm="vllm" in pins)
    accepted = re.search(r'^PYTHON_VERSIONS="([^"]*)"$', SETUP, re.MULTILINE)[1].split()
    stated = SpecifierSet(PYPROJECT["project"]["requires-python"])
    assert [f"3.{minor}" for minor in range(30) if f"3.{minor}" in stated] == accepted
    assert f"{sys.version_info[0]}.{sys.version_info[1]}" in accepted


@pytest.mark.parametrize("name", [*FILES, "pyproject.toml", *SHELL_SCRIPTS])
def test_install_files_name_no_host_or_local_path_and_scripts_are_strict(name):
    text = (ROOT / name).read_text()
    assert not re.search(r"--(extra-)?index-url|--find-links|https?://|file://", text)
    if name in SHELL_SCRIPTS:
        subprocess.run(["bash", "-n", str(ROOT / name)], check=True)
        assert "set -euo pipefail" in text.splitlines()


@pytest.mark.parametrize("name", ["demo", "setup", "test"])
def test_help_starts_nothing(name):
    command = ["bash", f"{ROOT}/scripts/{name}.sh", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    assert done.returncode == 0 and f"bash scripts/{name}.sh" in done.stdout


def test_the_demo_that_speaks_says_what_it_lacks(tmp_path):
    environ = {"PATH": os.environ["PATH"], "MODEL_ID": str(tmp_path), "VENV": str(tmp_path)}
    command = ["bash", f"{ROOT}/scripts/demo.sh", "--language"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=20)
    assert done.returncode == 2 and "make_model.py smollm2 --source" in done.stderr
    done = subprocess.run([*command[:2], "--speak"], env=environ, capture_output=True, text=True, timeout=20)
    assert done.returncode == 2 and "it takes --language or nothing" in done.stderr


@pytest.fixture
def setup(tmp_path, monkeypatch):
    """Runs setup.sh in a folder of its own, with `commands` first on its PATH; a setting of None is left out."""
    monkeypatch.delenv("VENV", raising=False)
    (tmp_path / "scripts").mkdir()
    for name in ["scripts/setup.sh", "requirements.txt", "requirements-cpu.txt"]:
        shutil.copy(ROOT / name, tmp_path / name)

    def run(*arguments, commands=None, **settings):
        path = f"{write_commands(tmp_path / 'bin', commands or {})}{os.pathsep}{os.environ['PATH']}"
        environment = {**os.environ, "PYTHON": sys.executable, "PATH": path, **settings}
        environment = {name: value for name, value in environment.items() if value is not None}
        command = ["bash", str(tmp_path / "scripts/setup.sh"), *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True)

    return run


def gpu(driver, name="NVIDIA H100 80GB HBM3", *capabilities):
    return {"nvidia-smi": "\n".join(f"echo '{name}, {driver}, {number}'" for number in capabilities or ["9.0"])}


OLD_DRIVER = "ERROR: the NVIDIA driver is 570.86.15"
OLD_PYTHONS = dict.fromkeys(["python3", "python3.11", "python3.12", "python3.13"], "echo 3.8")


@pytest.mark.parametrize(
    ("arguments", "settings", "commands", "code", "message"),
    [
        (["--nonsense"], {}, {}, 2, "unknown option"),
        (["--cpu", "--gpu"], {}, {}, 2, "exclude each other"),
        (["--cpu"], {"PYTHON": None}, OLD_PYTHONS, 3, "apt install python3.12"),
        ([], {}, {"nvidia-smi": "exit 9"}, None, "set: cpu, from requirements-cpu.txt"),
        ([], {}, gpu("580.10"), None, "set: gpu, from requirements.txt"),
        ([], {"ALLOW_UNTESTED": "0"}, gpu("570.86.15"), 4, OLD_DRIVER),
        (
            [],
            {"ALLOW_UNTESTED": "0"},
            gpu("570.86.15", "NVIDIA GH200 480GB"),
            4,
            "Install CUDA's forward-compatibility",
        ),
        ([], {"ALLOW_UNTESTED": "0"}, gpu("570.86.15", "NVIDIA GeForce RTX 4090"), 4, "is for data-center cards"),
        ([], {"ALLOW_UNTESTED": "1"}, gpu("570.86.15"), None, "because ALLOW_UNTESTED=1"),
        ([], {}, gpu("580.10", "Tesla V100", "7.0", "7.0"), 4, "Tesla V100 has compute capability 7.0, BF16 and Fl"),
        (["--gpu"], {}, gpu("580.10", "Tesla V100", "7.5"), 4, "need 8.0. Take an A100"),
        (["--cpu"], {}, gpu("580.10", "Tesla V100", "7.0"), 0, "set: cpu"),
        ([], {}, gpu("580.10", "one of each", "7.0", "8.6"), None, "set: gpu"),
        ([], {}, gpu("580.10", "NVIDIA RTX PRO 6000", "12.0"), None, "set: gpu"),
        ([], {}, gpu("580.10", "its capability is not told", "[N/A]"), None, "set: gpu"),
    ],
)
def test_setup_decides_before_anything_is_made(setup, tmp_path, arguments, settings, commands, code, message):
    """Without an expected code the rest depends on this machine (compiler, headers)."""
    done = setup(*arguments, "--dry-run", commands=commands, **settings)
    assert message in done.stdout + done.stderr and code in (None, done.returncode), done.stderr
    assert ("needs driver 580" in done.stderr) == ("570.86.15" in commands.get("nvidia-smi", ""))
    assert (OLD_DRIVER in done.stderr) == (code == 4 and "570.86.15" in commands["nvidia-smi"]) and not (
        tmp_path / ".venv"
    ).exists()


def test_another_compiler_may_be_named(setup, tmp_path):
    """In CC, which Triton looks at first; the check before a run takes it as well."""
    tools = write_commands(tmp_path / "tools", gpu("580.10") | {"getconf": "echo glibc 2.39"})
    for name in ("bash", "cat", "cut", "dirname", "grep", "ls", "sha256sum", "sort", "tr"):
        (tools / name).symlink_to(str(shutil.which(name)))
    for compiler in ("", "/opt/cc"):
        done = setup("--dry-run", PATH=str(tools), CC=compiler)
        assert ("no C compiler" in done.stderr) == (not compiler) and "set: gpu" in done.stdout, done.stderr


LIBCUDA = """
int cuInit(unsigned flags) {{ return {code}; }}
int cuDriverGetVersion(int *version) {{ *version = {version}; return 0; }}
"""


@pytest.mark.skipif(not shutil.which("gcc"), reason="a stand-in for libcuda has to be compiled")
@pytest.mark.parametrize(
    ("code", "version", "message"),
    [
        (0, 13000, "goes with CUDA 13 by the forward-compatibility library in "),
        (804, 13000, "it is not for this card"),
        (0, 12080, "it is older than CUDA 13"),
    ],
)
@pytest.mark.parametrize("variable", ["CUDA_HOME", "CONDA_PREFIX"])
def test_setup_goes_on_beside_an_old_driver_with_a_library_that_works(
    setup, tmp_path, code, version, message, variable
):
    """What counts is what the library itself says about driver and card, not that it lies there."""
    folder = tmp_path / {"CUDA_HOME": "compat", "CONDA_PREFIX": "cuda-compat"}[variable]
    folder.mkdir()
    (tmp_path / "cuda.c").write_text(LIBCUDA.format(code=code, version=version))
    library = folder / "libcuda.so.1"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, tmp_path / "cuda.c"], check=True)
    unset = dict.fromkeys({"CUDA_HOME", "CONDA_PREFIX", "LD_LIBRARY_PATH"} - {variable})
    done = setup("--dry-run", commands=gpu("570.86.15"), ALLOW_UNTESTED="0", **unset, **{variable: str(tmp_path)})
    works = code == 0 and version == 13000
    assert f"{message}{folder if works else ''}" in done.stdout + done.stderr
    assert (OLD_DRIVER in done.stderr) == (not works) and (done.returncode != 4 or not works), done.stderr


def test_setup_leaves_foreign_folders_alone(setup, tmp_path):
    """It replaces neither a folder of the user's nor, unasked, the environment of the other set."""
    precious = tmp_path / "mine" / "precious.txt"
    precious.parent.mkdir()
    precious.write_text("kept")
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv/.setup-stamp").write_text("gpu 0123\n")
    for venv, message in (("mine", "not made by this"), (None, "holds the gpu set")):
        done = setup("--cpu", VENV=venv)
        assert done.returncode == 2 and message in done.stderr
    assert precious.read_text() == "kept"


# A Python that installs nothing: it records the calls of pip and uv in $CALLS, and fails where $FAIL matches.
NO_PYTHON = """
case "$1 ${2:-}" in
    "-c "*) case "$2" in *version_info*) echo 3.12 ;; esac ;;
    "-m venv") mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
    "-m "*) echo "$2 ${*: -1}" >>"$CALLS"; ! [[ "$2 ${*: -1}" =~ ^($FAIL)$ ]] ;;
esac
"""


def test_a_shell_finds_the_compatibility_library_again(setup, tmp_path):
    """setup.sh writes it into the environment's activate, once."""
    folder = tmp_path / "cuda/compat"
    folder.mkdir(parents=True)
    (folder / "libcuda.so.1").touch()
    answers = (
        f"*version_info*) echo 3.12 ;; *get_path*) echo {tmp_path} ;; *cuInit*) [[ $LD_LIBRARY_PATH == {folder}* ]]"
    )
    python = NO_PYTHON.replace("*version_info*) echo 3.12", answers)
    (tmp_path / "Python.h").touch()
    settings = {"PYTHON": str(tmp_path / "bin/no-python"), "CALLS": os.devnull, "FAIL": "", "LD_LIBRARY_PATH": "/mine"}
    commands = {"no-python": python, "gcc": "exit 0", **gpu("570.86.15")}
    for _ in range(2):
        done = setup(commands=commands, CUDA_HOME=str(folder.parent), CONDA_PREFIX=None, **settings)
        assert done.returncode == 0, done.stderr
        (tmp_path / ".venv/.setup-stamp").write_text("gpu changed\n")
    command = f"source {tmp_path}/.venv/bin/activate && echo $LD_LIBRARY_PATH"
    shell = subprocess.run(["bash", "-c", command], env={"LD_LIBRARY_PATH": "/mine"}, capture_output=True, text=True)
    assert shell.stdout == f"{folder}:/mine\n"


PLAIN = ["pip torch==T+cpu", "pip requirements-cpu.txt"]
BY_UV = ["pip torch==T+cpu", "pip uv==U", "uv torch==T", "pip requirements-cpu.txt"]


@pytest.mark.parametrize(
    ("fail", "expected", "code"),
    [
        ("", PLAIN, 0),
        (r"pip torch.*", BY_UV, 0),
        (r"pip torch.*|pip uv.*", [line for line in BY_UV if not line.startswith("uv")], 0),
        (r"pip requirements.*", PLAIN, 1),
    ],
)
def test_setup_looks_for_torchs_cpu_build_first(setup, tmp_path, fail, expected, code):
    """By pip, else by uv; where neither has it, setup.sh warns and takes what pip finds."""
    calls = tmp_path / "calls.txt"
    settings = {"PYTHON": str(tmp_path / "bin/no-python"), "CALLS": str(calls), "commands": {"no-python": NO_PYTHON}}
    done = setup("--cpu", FAIL=fail, **settings)
    uv = re.search(r"^UV_VERSION=(.*)$", SETUP, re.MULTILINE)[1]
    lines = [line.replace("==T", str(CPU["torch"].specifier)).replace("U", uv) for line in expected]
    assert (done.returncode, calls.read_text().splitlines()) == (code, lines), done.stderr
    assert ("CUDA build" in done.stderr) == (fail.count("|") == 1)
    # An interrupted installation is taken up by the next run; a finished one is left alone until the set changes.
    again = setup("--cpu", FAIL="", **settings)
    assert again.returncode == 0 and ("nothing to do" in again.stdout) == (code == 0)
    with (tmp_path / "requirements-cpu.txt").open("a") as file:
        file.write("# changed\n")
    assert "nothing to do" not in setup("--cpu", "--dry-run", **settings).stdout
