"""bmt-core holds what two packages share, and what starts a run; what one package alone uses lies
in that package.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

from bmtrain._table import OLD_PATHS, TABLE

PACKAGES = Path(__file__).parents[1] / "packages"
LARGEST = 15_850
"""Lines of the core. When it shrinks, so does this number; what makes it grow should have a reason:
the last were 100 for attempts of torchrun, 711 for memory that GPUs of one host share, half of
which bmt-tp had for itself, for ranks of pipelines that fail alone, and for calls on GPUs that a
rank does not enter, 33 for ``optimizer_shards``, 10 for calls whose digests are compared, 35 for
loads that wait for updates and the pace of NCCL's monitors, 323 for errors that are shown once and
keyword arguments that name the one that is meant, 68 for counts of tokens, 14 for gradients that
are reduced beside an owner, 10 for gathers whose gradients are summed, 42 for losses of closures
that are those of all ranks, 17 for offers under names of bmt's, 23 for packages of several
versions, 27 for advice on packages that are missing, 42 for threads that may stay in a call of
torch, 12 for ``param_dtype`` and ``keep``, 10 for hooks of modules and default devices, 611 for the
loss without logits, of which bmtrain had 212 for itself, and the rest for operations on parts,
their dimensions and attributes.
"""

START_UP = {
    "bmt_core.core_plugin": "what the core itself adds to a run, by the hooks that plugins use",
    "bmt_core.modules.refused_functions": (
        "functions of torch that a run wraps, since they would be wrong on parts"
    ),
    "bmt_core.params.elementwise": (
        "steps of torch's optimizers that a run checks, also where bmt-optim is not installed"
    ),
    "bmt_core.params.ndim_groups": "the same, for groups by len(p.shape)",
    "bmt_core.params.plain_loop_warnings": "the same, for loops without an OptimManager",
}
ALLOWED = START_UP

Imports = set[tuple[str, str]]


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


CORE = modules_of(PACKAGES / "bmt-core")
OFFERED = {
    name: dict[str, tuple[str, str]]((what, (module, what)) for module, what in imports_in(path))
    for name, path in CORE.items()
    if path.name == "__init__.py"
}
"""What the packages in the core pass on from their modules."""


def defined_in(module: str, name: str) -> set[str]:
    """The modules of the core that ``from module import name`` is about: the one that defines it,
    or all of a package.
    """
    if f"{module}.{name}" in OFFERED:
        return {
            place for what in OFFERED[f"{module}.{name}"].values() for place in defined_in(*what)
        }
    if f"{module}.{name}" in CORE:
        return {f"{module}.{name}"}
    if name in OFFERED.get(module, {}):
        return defined_in(*OFFERED[module][name])
    return {module} & CORE.keys()


def reached(imports: Imports) -> set[str]:
    """The modules of the core that ``imports`` lead to, by themselves or through others."""
    found: set[str] = set()
    left = [module for each in imports for module in defined_in(*each)]
    while left:
        module = left.pop()
        if module not in found:
            found.add(module)
            left += (
                []
                if module in OFFERED
                else [other for each in imports_in(CORE[module]) for other in defined_in(*each)]
            )
    return found


def users() -> dict[str, set[str]]:
    """The packages that use each module of the core."""
    found = defaultdict[str, set[str]](set)
    for package in PACKAGES.iterdir():
        if package.name == "bmt-core":
            continue
        imports = {each for path in modules_of(package).values() for each in imports_in(path)}
        if package.name == "bmtrain":
            tables = [*TABLE.values(), *OLD_PATHS.values()]
            imports |= {
                (home.module, home.attribute) for table in tables for home in table.values()
            }
        for module in reached(imports):
            found[module].add(package.name)
    return found


def test_every_module_of_the_core_is_used_by_two_packages_or_starts_a_run() -> None:
    found = users()
    assert {"bmt-zero", "bmt-optim", "bmt-checkpoint"} <= found["bmt_core.params.parameter"]
    files = {name for name in CORE if name not in OFFERED}
    alone = {name: found[name] for name in files if len(found[name]) < 2}
    assert {name: packages for name, packages in alone.items() if name not in ALLOWED} == {}
    assert ALLOWED.keys() - alone.keys() == set(), (
        "used by two packages, or gone: no exception is needed"
    )


def test_the_core_does_not_grow_unnoticed() -> None:
    lines = sum(len(path.read_text().splitlines()) for path in CORE.values())
    assert lines <= LARGEST
