"""``read_uses``: which test uses which object of our packages, read from the tests' source."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

OURS = (
    "bmt_checkpoint",
    "bmt_core",
    "bmt_cp",
    "bmt_hf",
    "bmt_kernels",
    "bmt_optim",
    "bmt_params",
    "bmt_pipeline",
    "bmt_testing",
    "bmt_tp",
    "bmt_watch",
    "bmt_zero",
    "bmtrain",
)


@dataclass
class Definition:
    """What the code of a function, class or constant of a test file names.

    ``paths``: into our packages; ``attributes`` of anything; other ``words``; ``needs``:
    definitions of test files.
    """

    paths: set[str] = field(default_factory=set)
    attributes: set[str] = field(default_factory=set)
    words: set[str] = field(default_factory=set)
    needs: set[tuple[str, str]] = field(default_factory=set)


class Uses:
    """What each test uses, by itself and through helpers of test files. ``used_by``: test -> paths
    into our packages.
    """

    def __init__(self, definitions: dict[tuple[str, str], Definition]) -> None:
        self.used_by: dict[str, set[str]] = {}
        self._objects: dict[str, set[int]] = {}
        self._words: dict[str, set[str]] = {}
        self._attributes: dict[str, set[str]] = {}
        for file, name in definitions:
            if name.startswith("test_") and Path(file).name.startswith("test_"):
                reached = _reached(definitions, (file, name))
                test = f"{file}::{name}"
                self.used_by[test] = {path for definition in reached for path in definition.paths}
                self._objects[test] = {id(_object(path)) for path in self.used_by[test]}
                self._attributes[test] = {
                    name for definition in reached for name in definition.attributes
                }
                self._words[test] = self._attributes[test].union(
                    *(definition.words for definition in reached)
                )

    def tests_of(self, value: object, member: str = "") -> list[str]:
        """Return the tests that name ``value`` by any of its paths; or the attribute ``member``,
        together with ``value`` if any do.

        The type of what has the attribute is not known: ``current().topology.group()`` says
        ``group`` and not ``Topology``.
        """
        of_value = [test for test, objects in self._objects.items() if id(value) in objects]
        if not member:
            return of_value
        return [test for test in of_value if member in self._words[test]] or [
            test for test, attributes in self._attributes.items() if member in attributes
        ]


def read_uses(root: Path) -> Uses:
    """Read all tests below ``root``."""
    folders = [
        *root.glob("packages/*/tests"),
        root / "integration-tests",
        root / "tools" / "tests",
        root / "examples",
    ]
    files = sorted(path for folder in folders for path in folder.rglob("*.py"))
    names = {path.stem: str(path.relative_to(root)) for path in files}
    definitions: dict[tuple[str, str], Definition] = {}
    for path in files:
        _read_file(str(path.relative_to(root)), ast.parse(path.read_text()), names, definitions)
    return Uses(definitions)


def _read_file(
    file: str,
    tree: ast.Module,
    helpers: dict[str, str],
    definitions: dict[tuple[str, str], Definition],
) -> None:
    imported = _imports(ast.walk(tree))
    for statement in tree.body:
        names = _defined(statement)
        if names:
            definition = _read(file, statement, imported, helpers)
            for name in names:
                definitions[file, name] = definition


def _imports(nodes: Iterable[ast.AST]) -> dict[str, str]:
    """Return local name -> what it was imported from, as a dotted path."""
    found: dict[str, str] = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {
                (a.asname or a.name.split(".")[0]): (a.name if a.asname else a.name.split(".")[0])
                for a in node.names
            }
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {(a.asname or a.name): f"{node.module}.{a.name}" for a in node.names}
    return found


def _defined(statement: ast.stmt) -> list[str]:
    if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
        return [statement.name]
    if isinstance(statement, (ast.Assign, ast.AnnAssign)):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        return [
            node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)
        ]
    return []


def _read(
    file: str, code: ast.AST, imported: dict[str, str], helpers: dict[str, str]
) -> Definition:
    found = Definition()
    for node in ast.walk(code):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.words.add(node.value)
        elif isinstance(node, ast.FunctionDef):
            found.words.add(node.name)
        elif isinstance(node, ast.keyword) and node.arg:
            found.words.add(node.arg)
        elif isinstance(node, (ast.Attribute, ast.Name)):
            first, *rest = _chain(node)
            found.attributes.update(rest)
            origin = imported.get(first, "")
            module = origin.split(".")[0]
            if module in OURS:
                found.paths.update(".".join([origin, *rest[:end]]) for end in range(len(rest) + 1))
            elif module in helpers:
                found.needs.add((helpers[module], (origin.split(".")[1:] + rest + [""])[0]))
            elif first:
                found.needs.add((file, first))
    return found


def _chain(node: ast.AST) -> list[str]:
    """Return ``a.b.c`` as its parts; the first is empty if it is not a name."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.insert(0, node.attr)
        node = node.value
    return [node.id if isinstance(node, ast.Name) else "", *parts]


def _reached(
    definitions: dict[tuple[str, str], Definition], start: tuple[str, str]
) -> list[Definition]:
    pending, seen = [start], {start}
    for key in pending:
        new = sorted((definitions[key].needs - seen) & definitions.keys())
        seen.update(new)
        pending += new
    return [definitions[key] for key in pending]


@cache
def _object(path: str) -> Any:
    """Return what ``path`` is of our packages; None if it is nothing."""
    first, *rest = path.split(".")
    found: Any = importlib.import_module(first)
    for part in rest:
        if not isinstance(found, ModuleType):
            return None
        try:
            found = (
                getattr(found, part)
                if hasattr(found, part)
                else importlib.import_module(f"{found.__name__}.{part}")
            )
        except ImportError:
            return None
    return found
