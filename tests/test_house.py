# SPDX-License-Identifier: Apache-2.0
"""The house: imports go one way, light rooms stay light, nothing grows too long. Run: python -m pytest tests/test_house.py"""

from __future__ import annotations

import ast
import functools
import os
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from conftest import CLEAN, ROOT

ROOMS = [  # in the order of a run: each may import those above it; the entry and scripts/ any
    "rewards", "grpo.other_names", "grpo.settings_table", "grpo.settings", "grpo.phases", "grpo.data", "grpo.tasks",
    "grpo.run", "grpo.plan", "grpo.preflight", "grpo.model", "grpo.rollout", "grpo.learn", "grpo.evaluate", "grpo.measure", "grpo.verl",
]  # fmt: skip
HEAVY = {"torch", "transformers", "trl", "peft", "vllm", "liger_kernel", "datasets"}
ENTRY = ROOT / "train_grpo.py"
SCRIPTS = sorted((ROOT / "scripts").rglob("*.py"))
FILES = [ROOT / "rewards.py", *sorted((ROOT / "grpo").rglob("*.py")), ENTRY, *SCRIPTS]
MODULES = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in FILES}
MODULES |= {path.stem: path for path in SCRIPTS}  # scripts/ is on the path of what runs there
LONGEST_MODULE, LONGEST_FUNCTION = 450, 80
FUNCTIONS = ast.FunctionDef, ast.AsyncFunctionDef


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imports(path: Path, top: bool = False) -> Iterator[tuple[int, str]]:
    """(line, module) of every import of a file; only those outside functions with `top`. `from grpo.data import files`
    imports grpo.data.files."""
    functions = [node for node in ast.walk(tree_of(path)) if top and isinstance(node, FUNCTIONS)]
    inside = {node for function in functions for node in ast.walk(function)}
    for node in set(ast.walk(tree_of(path))) - inside:
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}:{node.lineno}: a relative import"
            for name in (f"{node.module}.{alias.name}" for alias in node.names):
                yield node.lineno, name if name in MODULES else node.module


def floor(module: str) -> int | None:
    """Where a module's room stands in ROOMS; None for what is no room."""
    return next((n for n, room in enumerate(ROOMS) if module == room or module.startswith(f"{room}.")), None)


def shown(path: Path, line: int) -> str:
    return f"{path.relative_to(ROOT)}:{line}"


def test_every_module_has_a_room_and_a_docstring():
    homeless = [name for name, path in MODULES.items() if path not in (ENTRY, *SCRIPTS) and floor(name) is None]
    assert homeless == ["grpo"]
    assert not [name for name, path in MODULES.items() if tree_of(path).body and not ast.get_docstring(tree_of(path))]


def test_a_room_imports_only_rooms_above_it():
    upwards = []
    for name, path in MODULES.items():
        mine = floor(name)
        for line, target in imports(path) if mine is not None else ():
            theirs = len(ROOMS) if target in MODULES and floor(target) is None and target != "grpo" else floor(target)
            if theirs is not None and theirs > mine:
                upwards.append(f"{shown(path, line)}: {name} imports {target}")
    assert not upwards, "\n".join(upwards)


def test_no_modules_import_each_other_in_a_circle():
    graph = {name: {target for _, target in imports(path) if target in MODULES} for name, path in MODULES.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


# Imported in a function, for those who name a data set of the Hub or whose tokenizer has a response template. They
# take a second, and load no torch.
LATE = {("grpo/data/formats.py", "datasets"), ("grpo/data/scoring.py", "transformers.utils.chat_parsing")}


def test_light_rooms_import_nothing_heavy():
    light = [path for name, path in MODULES.items() if floor(name) in range(ROOMS.index("grpo.model"))]
    targets = [(path, *found) for path in [*light, ENTRY] for found in imports(path, top=path == ENTRY)]
    heavy = [target for target in targets if target[2].partition(".")[0] in HEAVY]
    found = [f"{shown(p, n)}: {name}" for p, n, name in heavy if (str(p.relative_to(ROOT)), name) not in LATE]
    assert not found, "\n".join(found)


def test_what_light_rooms_import_is_light_too(tmp_path):
    """Whatever the imports say: a check of the whole input loads nothing heavy."""
    code = (
        "import sys, train_grpo; code = train_grpo.main(['--check']);"
        f"heavy = {HEAVY | {'pandas'}} & set(sys.modules); assert not heavy, heavy; sys.exit(code)"
    )
    environ = CLEAN | {"MODEL_ID": "tiny", "OUTPUT_DIR": str(tmp_path / "run")}
    done = subprocess.run([sys.executable, "-c", code], env=environ, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Nothing was started" in done.stdout and not (tmp_path / "run").exists()


def test_without_any_package_the_check_says_what_is_missing(tmp_path):
    """As in a shell whose environment was not activated: no site-packages at all."""
    environ = CLEAN | {"MODEL_ID": "tiny", "OUTPUT_DIR": str(tmp_path / "run"), "PYTHONPATH": ""}
    code = f"import sys; sys.path.insert(0, {os.fspath(ROOT)!r}); import train_grpo; sys.exit(train_grpo.main(sys.argv[1:]))"
    command = [sys.executable, "-S", "-c", code]
    done = subprocess.run([*command, "--check"], env=environ, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and "one problem to fix" in done.stderr
    assert (
        ": torch, transformers, trl, peft," in done.stderr
        and "Run `bash scripts/setup.sh`, then `source" in done.stderr
    )
    assert not subprocess.run([*command, "--help"], env=environ, cwd=tmp_path, capture_output=True).returncode
    done = subprocess.run([*command, "--seed", "5"], env=environ, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and "set SEED=5" in done.stderr


def test_no_module_and_no_function_is_too_long():
    long = []
    for path in FILES:
        if (count := len(path.read_text(encoding="utf-8").splitlines())) > LONGEST_MODULE:
            long.append(f"{path.relative_to(ROOT)}: {count} lines")
        for node in ast.walk(tree_of(path)):
            if isinstance(node, FUNCTIONS) and (count := node.end_lineno - node.lineno + 1) > LONGEST_FUNCTION:
                long.append(f"{shown(path, node.lineno)}: {node.name} has {count} lines")
    assert not long, "\n".join(long)
