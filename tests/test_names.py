"""Names and docstrings: what a test can hold of how this code is written."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from test_house import FILES, FUNCTIONS, ROOT, position, tree_of

# Words that say nothing about the thing that they name.
EMPTY = {"found", "one", "what", "given", "made", "told", "some", "way"}
# These are called by a framework, which documents them, or by `if __name__`.
DOCUMENTED_ELSEWHERE = {"forward", "backward", "emit", "handleError", "main", "parse_args"}
TESTS = sorted((ROOT / "tests").rglob("*.py"))


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
