"""bmt-core and bmt-params hold what two packages above them share, and what starts a run; what one
package alone uses lies in that package.
"""

from __future__ import annotations

import ast
import functools
from collections import defaultdict
from pathlib import Path

from bmtrain._table import OLD_PATHS, TABLE

PACKAGES = Path(__file__).parents[1] / "packages"
SHARED = ("bmt-core", "bmt-params")
"""Packages on which others stand; each uses those before it."""

ALONE = {
    "bmt_core.core_plugin": "what the core itself adds to a run, by the hooks that plugins use",
    "bmt_params.plugin": "what bmt-params adds to a run, by the same hooks",
    "bmt_params.guards.refused_functions": (
        "functions of torch that a run wraps, since they would be wrong on parts"
    ),
    "bmt_params.guards.elementwise": (
        "steps of torch's optimizers that a run checks, also where bmt-optim is not installed"
    ),
    "bmt_params.guards.ndim_groups": "the same, for groups by len(p.shape)",
    "bmt_params.guards.plain_loop_warnings": "the same, for loops without an OptimManager",
}
"""Modules that fewer than two other packages use, with the reason why they are not there."""

Imports = set[tuple[str, str]]


@functools.cache
def imports_in(path: Path) -> Imports:
    """The (module, name) of each ``from module import name`` in the file."""
    nodes = [
        node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)
    ]
    return {(node.module or "", alias.name) for node in nodes for alias in node.names}


def modules_of(package: Path) -> dict[str, Path]:
    """The files of a package by the names of their modules."""
    found = {}
    for path in (package / "src").rglob("*.py"):
        parts = path.relative_to(package / "src").with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = {
    name: path for package in SHARED for name, path in modules_of(PACKAGES / package).items()
}
OFFERED = {
    name: dict[str, tuple[str, str]]((what, (module, what)) for module, what in imports_in(path))
    for name, path in MODULES.items()
    if path.name == "__init__.py"
}
"""What their packages pass on from their modules."""


def defined_in(module: str, name: str) -> set[str]:
    """The shared modules that ``from module import name`` is about: the one that defines it,
    or all of a package.
    """
    if f"{module}.{name}" in OFFERED:
        return {
            place for what in OFFERED[f"{module}.{name}"].values() for place in defined_in(*what)
        }
    if f"{module}.{name}" in MODULES:
        return {f"{module}.{name}"}
    if name in OFFERED.get(module, {}):
        return defined_in(*OFFERED[module][name])
    return {module} & MODULES.keys()


def reached(imports: Imports, package: str) -> set[str]:
    """The modules of the shared ``package`` that ``imports`` lead to, by themselves or through
    others of the package.
    """
    found: set[str] = set()
    left = [module for each in imports for module in defined_in(*each)]
    while left:
        module = left.pop()
        if module not in found and module.startswith(f"{package}."):
            found.add(module)
            left += (
                []
                if module in OFFERED
                else [other for each in imports_in(MODULES[module]) for other in defined_in(*each)]
            )
    return found


def users() -> dict[str, set[str]]:
    """The packages that use each shared module."""
    found = defaultdict[str, set[str]](set)
    for package in PACKAGES.iterdir():
        imports = {each for path in modules_of(package).values() for each in imports_in(path)}
        if package.name == "bmtrain":
            tables = [*TABLE.values(), *OLD_PATHS.values()]
            imports |= {
                (home.module, home.attribute) for table in tables for home in table.values()
            }
        for shared in SHARED:
            for module in reached(imports, shared.replace("-", "_")):
                if shared != package.name:
                    found[module].add(package.name)
    return found


def test_every_shared_module_is_used_by_two_packages_or_starts_a_run() -> None:
    found = users()
    assert {"bmt-zero", "bmt-optim", "bmt-checkpoint"} <= found["bmt_params.parameter"]
    files = {name for name in MODULES if name not in OFFERED}
    alone = {name: found[name] for name in files if len(found[name]) < 2}
    assert {name: packages for name, packages in alone.items() if name not in ALONE} == {}
    assert ALONE.keys() - alone.keys() == set(), (
        "used by two packages, or gone: no exception is needed"
    )
