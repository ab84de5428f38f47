#!/usr/bin/env python3
"""Write ``docs/names.md``: every public name, what it is, and a test that uses it.

Run with the Python of ``.venv`` after a change to public names:
``.venv/bin/python tools/names_page.py``. A test fails where a name has no test, and where the page
says what is no longer so.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from bmtrain._table import FILE_MODULES, OLD_PATHS, TABLE
from tests_read import Uses, read_uses

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "names.md"
PACKAGES = (
    "bmt_core",
    "bmt_params",
    "bmt_checkpoint",
    "bmt_zero",
    "bmt_optim",
    "bmt_pipeline",
    "bmt_tp",
    "bmt_hf",
    "bmt_testing",
)
OLD_PATHS_TEST = (
    "packages/bmtrain/tests/test_facade.py::test_old_paths_have_the_names_of_the_packages"
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
        """What the page calls it."""
        return f"{self.paths[0]}.{self.member}" if self.member else self.paths[0]


def main() -> int:
    """Write the page; return 1 if a name has no test."""
    names, uses = public_names(), read_uses(ROOT)
    before = listed_tests(PAGE.read_text()) if PAGE.exists() else {}
    tests = {name.title: chosen_test(name, uses, before.get(name.title)) for name in names}
    missing = [title for title, test in tests.items() if test is None]
    PAGE.write_text(page(names, {title: test or "" for title, test in tests.items()}))
    print(f"{len(names)} names", *(f"without a test: {title}" for title in missing), sep="\n")
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


def chosen_test(name: Name, uses: Uses, before: str | None) -> str | None:
    """Return ``before`` if that test still uses ``name``, so that the page stays; otherwise the
    test that uses least besides.
    """
    tests = uses.tests_of(name.value, name.member)
    if before in tests or not tests:
        return before if before in tests else None
    return min(tests, key=lambda test: ("gpu" in test, len(uses.used_by[test]), test))


def page(names: list[Name], tests: dict[str, str]) -> str:
    """Return the text of the page."""
    lines = [
        "# Names",
        "",
        "Every public name, what it is, and a test that uses it. Written by `tools/names_page.py`.",
        "",
        "| name | what it is | test |",
        "|---|---|---|",
    ]
    for name in names:
        also = "" if name.member else "".join(f", `{path}`" for path in name.paths[1:])
        lines.append(f"| `{name.title}`{also} | {meaning(name)} | {_shown(tests[name.title])} |")
    lines += ["", "## Old paths", "", "Modules of BMTrain that have names from above.", ""]
    lines += ["| module | names | test |", "|---|---|---|"]
    for module, table in OLD_PATHS.items():
        listed = ", ".join(f"`{name}`" for name in table)
        lines.append(f"| `{module}` | {listed} | {_shown(OLD_PATHS_TEST)} |")
    return "\n".join(lines) + "\n"


def meaning(name: Name) -> str:
    """Return the first sentence of what the code says of ``name``."""
    value: Any = (
        inspect.getattr_static(name.value, name.member, None) if name.member else name.value
    )
    text = (inspect.getdoc(value) or "") if _has_own_text(value) else ""
    first = (
        re.split(r"(?<=[.:;])(?<! al\.)\s", " ".join(text.split("\n\n")[0].split()))[0]
        if text
        else ""
    )
    plain = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", first).replace("``", "`").rstrip(":;")
    if not plain and name.member:
        return f"See `{name.paths[0]}`."
    return (plain or str(value).removeprefix("typing.")).replace("|", "\\|")


def _has_own_text(value: object) -> bool:
    """Whether the docstring of ``value`` says something of it; that of a number or a text is
    its type's.
    """
    is_ours = type(value).__module__.startswith("bmt")
    return (
        is_ours
        or callable(value)
        or isinstance(value, (ModuleType, property, classmethod, staticmethod))
    )


def listed_tests(text: str) -> dict[str, str]:
    """Return the test of each name that the page lists."""
    rows = [
        line.split(" | ")
        for line in text.partition("## Old paths")[0].splitlines()
        if line.startswith("| `")
    ]
    return {row[0].split("`")[1]: _from_shown(row[-1].removesuffix(" |")) for row in rows}


def _shown(test: str) -> str:
    path, _, function = test.partition("::")
    return f"[{function}](../{path})"


def _from_shown(link: str) -> str:
    function, _, path = link.strip("[)").partition("](../")
    return f"{path}::{function}"


if __name__ == "__main__":
    sys.exit(main())
