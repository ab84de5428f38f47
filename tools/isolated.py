#!/usr/bin/env python3
"""Test packages alone: each in a bare virtual environment that holds its declared dependencies and nothing else of ours.

What a package uses without declaring it fails here. Then the facade is added, and must name the package that provides
each name which cannot be had.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import tomllib
import venv
from collections.abc import Sequence
from pathlib import Path

import dev

TEST_REQUIREMENTS = ("pytest", "hypothesis")

CHECK_FACADE = """
import importlib, importlib.util, sys
from bmtrain._table import TABLE

missing = {}
for module, names in TABLE.items():
    for name, home in names.items():
        if importlib.util.find_spec(home.package) is not None:
            getattr(importlib.import_module(module), name)
            continue
        try:
            getattr(importlib.import_module(module), name)
        except ModuleNotFoundError as error:
            assert home.distribution in str(error), error
            missing.setdefault(home.package, error)
        else:
            sys.exit(f"{module}.{name} is there although {home.distribution} is not installed")
for error in missing.values():
    print(error)
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Test the packages that are named, or all, and return the exit status."""
    known = {directory.name: directory for directory in dev.package_directories()}
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("packages", nargs="*", metavar="PKG", help=f"any of {', '.join(known)} (default: all)")
    names = parser.parse_args(arguments).packages or list(known)
    if unknown := [name for name in names if name not in known]:
        parser.error(f"no package is named {', '.join(unknown)}; there are {', '.join(known)}")
    dev.setup()
    results: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="bmt-isolated-") as temporary:
        wheels = Path(temporary, "wheels")
        status = dev.build_wheels(wheels, list(known.values()))
        if status != 0:
            return status
        for name in names:
            with tempfile.TemporaryDirectory(prefix=f"{name}-", dir=temporary) as directory:
                results[name] = check_package(known[name], wheels, Path(directory))
    print()
    for name, result in results.items():
        print(f"{'ok    ' if result == 'ok' else 'FAILED'} {name}" + ("" if result == "ok" else f": {result}"))
    return 0 if set(results.values()) == {"ok"} else 1


def check_package(package: Path, wheels: Path, directory: Path) -> str:
    """Install and test the package of directory ``package``, in ``directory``; return "ok" or what failed."""
    print(f"\n== {package.name}", flush=True)
    environment = directory / "venv"
    venv.create(environment, with_pip=True)
    python = str(environment / "bin" / "python")
    pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    ours = [str(wheel_of(name, wheels)) for name in siblings_of(package)]
    constraints = ["--constraint", str(dev.REQUIREMENTS)]
    tests = ["-c", str(dev.ROOT / "pyproject.toml"), "--rootdir", str(dev.ROOT), "-p", "no:cacheprovider", "-q"]
    steps = {
        "installing": [*pip, *constraints, *ours, *TEST_REQUIREMENTS],
        "its tests": [python, "-m", "pytest", *tests, str(package / "tests")],
        "installing the facade": [*pip, "--no-deps", str(wheel_of("bmt-train", wheels))],
        "the facade's messages": [python, "-c", CHECK_FACADE],
    }
    for what, command in steps.items():
        # Not from the tree: `python -m` puts the current directory first on the path.
        if subprocess.run(command, cwd=directory, env=dev.environment()).returncode != 0:
            return what
    return "ok"


def siblings_of(package: Path) -> list[str]:
    """Return the names of ``package`` itself and of the packages of ours that it requires, and those require."""
    project = tomllib.loads((package / "pyproject.toml").read_text())["project"]
    names = [project["name"]]
    for requirement in project["dependencies"]:
        match = re.match(r"[A-Za-z0-9-]+", requirement)
        sibling = package.parent / (match[0] if match else requirement)
        if sibling.is_dir():
            names += [name for name in siblings_of(sibling) if name not in names]
    return names


def wheel_of(name: str, wheels: Path) -> Path:
    """Return the wheel of our package ``name``. A path, so that no index is asked about a package of that name."""
    (wheel,) = wheels.glob(f"{name.replace('-', '_')}-*.whl")
    return wheel


if __name__ == "__main__":
    sys.exit(main())
