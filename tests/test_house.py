# SPDX-License-Identifier: Apache-2.0
"""The house: imports go one way, light rooms stay light, nothing grows too long, and every name means something."""

import ast
import functools
import os
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from helpers import ROOT, run_python

# In the order of a run: each may import those before it; the entry and scripts/ any.
ROOMS = [
    "grpo.numerals", "grpo.harmony", "rewards", "grpo.common", "grpo.settings", "grpo.phases", "grpo.data",
    "grpo.reward", "grpo.figures", "grpo.tasks", "grpo.output", "grpo.process", "grpo.environment", "grpo.plan",
    "grpo.preflight", "grpo.model", "grpo.rollout", "grpo.learn", "grpo.evaluate", "grpo.verl",
]  # fmt: skip
HEAVY = {"torch", "transformers", "trl", "peft", "vllm", "liger_kernel", "datasets"}
ENTRY = ROOT / "train_grpo.py"
SCRIPTS = sorted(path for path in (ROOT / "scripts").rglob("*.py") if path.parent.name != "tests")
FILES = [ROOT / "rewards.py", *sorted((ROOT / "grpo").rglob("*.py")), ENTRY, *SCRIPTS]
MODULES = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in FILES}
MODULES |= {path.stem: path for path in SCRIPTS if path.parent.name != "dev"}  # The path of a script that runs.
LONGEST_MODULE, LONGEST_FUNCTION = 450, 80
FUNCTIONS = ast.FunctionDef, ast.AsyncFunctionDef
# Words that say nothing about the thing that they name.
EMPTY = {"found", "one", "what", "given", "made", "told", "some", "way"}
# These are called by a framework, which documents them, or by `if __name__`.
DOCUMENTED_ELSEWHERE = {"forward", "backward", "emit", "handleError", "main", "parse_args"}
TESTS = sorted([*(ROOT / "tests").rglob("*.py"), *(ROOT / "scripts/dev/tests").glob("*.py")])


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def imports(path: Path, top: bool = False) -> Iterator[tuple[int, str]]:
    """(line, module) of every import of a file, with `top` only of those outside functions. Those for types alone are
    left out.

    `from grpo.data import files` imports grpo.data.files."""
    skipped = [node for node in ast.walk(tree_of(path)) if top and isinstance(node, FUNCTIONS) or is_for_types(node)]
    inside = {node for block in skipped for node in ast.walk(block)}
    for node in set(ast.walk(tree_of(path))) - inside:
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}:{node.lineno}: a relative import"
            for name in (f"{node.module}.{alias.name}" for alias in node.names):
                yield node.lineno, name if name in MODULES else node.module


def floor(module: str) -> int | None:
    """The position of a module's room in ROOMS; None for a module outside the rooms."""
    return next((n for n, room in enumerate(ROOMS) if module == room or module.startswith(f"{room}.")), None)


def position(path: Path, line: int) -> str:
    return f"{path.relative_to(ROOT)}:{line}"


def test_every_module_has_a_room_which_imports_only_rooms_above_it():
    homeless = [name for name, path in MODULES.items() if path not in (ENTRY, *SCRIPTS) and floor(name) is None]
    assert homeless == ["grpo"]
    upwards = []
    for name, path in MODULES.items():
        mine = floor(name)
        for line, target in imports(path) if mine is not None else ():
            theirs = len(ROOMS) if target in MODULES and floor(target) is None and target != "grpo" else floor(target)
            if theirs is not None and theirs > mine:
                upwards.append(f"{position(path, line)}: {name} imports {target}")
    assert not upwards, "\n".join(upwards)


def test_no_modules_import_each_other_in_a_circle():
    graph = {name: {target for _, target in imports(path) if target in MODULES} for name, path in MODULES.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


# Imported in a function for data sets of the Hub, in the process of an environment, and in a module of its own for
# several processes.
LATE = {
    ("grpo/data/formats.py", "datasets"),
    ("grpo/environment/worker.py", "transformers.utils.chat_template_utils"),
} | {("grpo/process/exchange.py", name) for name in ("torch", "torch.distributed")}


def test_light_rooms_import_nothing_heavy():
    light = {path for name, path in MODULES.items() if floor(name) in range(ROOMS.index("grpo.model"))} | {ENTRY}
    imported = [(path, line, target) for path in light for line, target in imports(path, top=path == ENTRY)]
    heavy = [position(path, line) for path, line, target in imported
             if target.partition(".")[0] in HEAVY and (str(path.relative_to(ROOT)), target) not in LATE]  # fmt: skip
    assert not heavy


IMPORT = f"import sys; sys.path.insert(0, {os.fspath(ROOT)!r}); import train_grpo; "


def test_a_check_loads_nothing_heavy(tmp_path):
    program = IMPORT + "code = train_grpo.main(['--check']); "
    program += f"heavy = {HEAVY | {'pandas'}} & set(sys.modules); assert not heavy, heavy; sys.exit(code)"
    done = run_python("-c", program, cwd=tmp_path, MODEL_ID="tiny", OUTPUT_DIR="run", PYTHONPATH="")
    assert "Nothing was started" in done.stdout and not (tmp_path / "run").exists()


def test_without_any_package_the_check_says_what_is_missing(tmp_path):
    """As in a shell whose environment was not activated: no site-packages at all."""
    bare = functools.partial(run_python, "-S", "-c", IMPORT + "sys.exit(train_grpo.main(sys.argv[1:]))", cwd=tmp_path)
    done = bare("--check", code=2, MODEL_ID="tiny", OUTPUT_DIR="run")
    assert "one problem to fix" in done.stderr
    assert ": torch, transformers, trl, peft," in done.stderr
    assert "Run `bash scripts/setup.sh`, then `source" in done.stderr
    bare("--help")
    assert "set SEED=5" in bare("--seed", "5", code=2).stderr


def test_every_script_ends_by_run_script():
    """It turns wrong input into exit code 2 and a line on stderr, which tests/process/test_ending.py runs."""
    last_lines = {path.stem: path.read_text(encoding="utf-8").splitlines() for path in SCRIPTS}
    last_lines = {
        name: lines[-1].strip() for name, lines in last_lines.items() if 'if __name__ == "__main__":' in lines
    }
    others = [name for name, line in last_lines.items() if line != "sys.exit(run_script(main))"]
    assert others == ["make_docs"], "it takes no input"


def test_no_module_and_no_function_is_too_long():
    long = []
    for path in FILES:
        if (count := len(path.read_text(encoding="utf-8").splitlines())) > LONGEST_MODULE:
            long.append(f"{path.relative_to(ROOT)}: {count} lines")
        for node in ast.walk(tree_of(path)):
            if isinstance(node, FUNCTIONS) and (count := node.end_lineno - node.lineno + 1) > LONGEST_FUNCTION:
                long.append(f"{position(path, node.lineno)}: {node.name} has {count} lines")
    assert not long, "\n".join(long)


def names(path: Path) -> Iterator[tuple[int, str]]:
    """(line, name) of everything that a file names itself: variables, arguments, functions, classes and fields."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            yield node.lineno, node.name


def public_definitions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    """The public functions and classes of a module, and the public methods of its classes."""
    definitions = [node for node in tree_of(path).body if isinstance(node, (*FUNCTIONS, ast.ClassDef))]
    classes = [node for node in definitions if isinstance(node, ast.ClassDef)]
    # An override inherits the docstring of the method that it replaces.
    methods = [node for owner in classes if not owner.bases for node in owner.body if isinstance(node, FUNCTIONS)]
    for node in (*definitions, *methods):
        if not node.name.startswith(("_", "on_")) and node.name not in DOCUMENTED_ELSEWHERE:
            yield node


def test_no_name_is_an_empty_word():
    used = [
        f"{position(path, line)}: {name}" for path in (*FILES, *TESTS) for line, name in names(path) if name in EMPTY
    ]
    assert not used, "\n".join(used)


def test_every_public_function_has_a_docstring():
    """Those of one or two lines speak for themselves."""
    missing = [
        f"{position(path, node.lineno)}: {node.name}"
        for path in FILES
        for node in public_definitions(path)
        if node.end_lineno - node.lineno > 2 and not ast.get_docstring(node)
    ]
    assert not missing, "\n".join(missing)
