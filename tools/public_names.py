#!/usr/bin/env python3
"""Print every public name, and a file of tests that has the word.

Run with the Python of ``.venv``: ``.venv/bin/python tools/public_names.py``. Names without a test
come last, and make the exit status 1; a test fails where there is one.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from bmtrain._table import FILE_MODULES, TABLE

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = (
    "bmt_core",
    "bmt_cp",
    "bmt_params",
    "bmt_checkpoint",
    "bmt_zero",
    "bmt_optim",
    "bmt_pipeline",
    "bmt_tp",
    "bmt_hf",
    "bmt_testing",
)
# What packages of bmt call on each other's objects, documented where it is defined; users call none
# of it.
SEAMS = {
    *(
        "check_logical_state",
        "complaint_about_options",
        "complaint_about_state",
        "scaling_gradients",
        "skips_on_device",
    ),
    *(
        "gathered_as",
        "is_own",
        "is_to_check",
        "layer_gradients",
        "layers_of_chunks",
        "layouts",
        "make_local",
        "split_arguments",
        "transfers",
    ),
}
# Further attributes that BMTrain's scripts use: with an underscore, set by __init__, or of what a
# function returns.
FURTHER: dict[str, tuple[str, ...]] = {
    "bmt.DistributedParameter": (
        *(
            "_copy_data",
            "_end_partition",
            "_in_block",
            "_init_method",
            "_original_shape",
            "_start_partition",
        ),
        *("_tp_mode", "_tp_original_shape", "_tp_split_dim", "_zero_comm"),
    ),
    "bmt.PipelineTransformerBlockList": ("pipe_idx", "stage_id", "stages"),
    "bmt.inspect.inspect_tensor": ("get_summary", "get_tensor", "summary"),
    "bmt.optim.OptimManager": ("backward", "lr_schedulers", "optimizers"),
}
OF_TORCH = {"forward", "backward", "extra_repr"}  # called by torch, never by name


class Name(NamedTuple):
    """Something public: the paths under which users find it, the object, and the attribute of it
    that is meant, if one is.
    """

    paths: tuple[str, ...]
    value: object
    member: str = ""

    @property
    def title(self) -> str:
        """What the list calls it."""
        return f"{self.paths[0]}.{self.member}" if self.member else self.paths[0]


def main() -> int:
    """Print the names and their tests; return 1 if a name has no test."""
    words = words_of_tests(ROOT)
    tests = {name.title: file_with(name, words) for name in public_names()}
    print(*(f"{title}  {test}" for title, test in tests.items() if test is not None), sep="\n")
    missing = [title for title, test in tests.items() if test is None]
    print(f"{len(tests)} names", *(f"without a test: {title}" for title in missing), sep="\n")
    return 1 if missing else 0


def public_names() -> list[Name]:
    """Return what the facade and the packages offer, each object once, followed by the attributes
    of the facade's classes.
    """
    paths: dict[int, list[str]] = {}
    values: dict[int, object] = {}
    for path, value in _found():
        paths.setdefault(id(value), []).append(path)
        values[id(value)] = value
    names = []
    for key, value in values.items():
        of_value = tuple(dict.fromkeys(paths[key]))
        names.append(Name(of_value, value))
        if of_value[0].startswith("bmt."):
            members = [*_members(value, values), *FURTHER.get(of_value[0], ())]
            names += [Name(of_value, value, member) for member in members]
    return names


def _found() -> Iterator[tuple[str, object]]:
    for module, table in TABLE.items():
        for name in sorted(table, key=str.lower):
            yield (
                f"{module.replace('bmtrain', 'bmt', 1)}.{name}",
                getattr(importlib.import_module(module), name),
            )
    for module in FILE_MODULES:
        found = importlib.import_module(module)
        own = [
            name
            for name, value in vars(found).items()
            if getattr(value, "__module__", None) == module
        ]
        for name in getattr(found, "__all__", [name for name in own if not name.startswith("_")]):
            yield f"{module.replace('bmtrain', 'bmt', 1)}.{name}", getattr(found, name)
    for module in PACKAGES:
        for name in importlib.import_module(module).__all__:
            yield f"{module}.{name}", getattr(importlib.import_module(module), name)


def _members(value: object, public: dict[int, object]) -> list[str]:
    """Return what ``value``, if it is a class, adds to the attributes of its bases that are public
    too; or the keys of a config.
    """
    if value is importlib.import_module("bmtrain").config:
        return list(importlib.import_module("bmtrain.global_var")._VALUES)
    if not inspect.isclass(value):
        return []
    own = [kind for kind in value.__mro__ if kind.__module__.startswith("bmt")]
    added = [kind for kind in own if kind is value or id(kind) not in public]
    inherited = {name for kind in own if kind not in added for name in vars(kind)}
    found = [name for kind in added for name in vars(kind) if not name.startswith("_")]
    return sorted({*found} - inherited - OF_TORCH - SEAMS)


def words_of_tests(root: Path) -> dict[str, frozenset[str]]:
    """Return the words in each file of tests below ``root``, and of what they import."""
    folders = [*root.glob("packages/*/tests"), root / "integration-tests", root / "examples"]
    files = sorted(path for folder in folders for path in folder.rglob("*.py"))
    return {str(path.relative_to(root)): words_in(path.read_text()) for path in files}


def words_in(code: str) -> frozenset[str]:
    """Return the names, attributes, keywords and texts in ``code``, without those of imports."""
    nodes = [node for node in ast.walk(ast.parse(code)) if not isinstance(node, ast.alias)]
    found = [getattr(n, key, None) for n in nodes for key in ("id", "attr", "arg", "name", "value")]
    return frozenset(word for word in found if isinstance(word, str))


def file_with(name: Name, words: Mapping[str, frozenset[str]]) -> str | None:
    """Return a file that has the word of ``name``, with few others beside it."""
    known = {name.member} if name.member else {path.rpartition(".")[2] for path in name.paths}
    found = [file for file, of_file in words.items() if known & of_file]
    return min(found, key=lambda file: ("gpu" in file, len(words[file]), file), default=None)


if __name__ == "__main__":
    sys.exit(main())
