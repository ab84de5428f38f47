#!/usr/bin/env python3
"""Test packages alone: each in a bare virtual environment that holds its declared dependencies and
nothing else of ours.

The tests are given ``bmt-testing``, too, and what the package lists as ``test`` in its
``[dependency-groups]``: further packages of ours that the tests use and the package does not. What
a package uses without declaring it fails here. Then the facade is added, and must name the package
that provides each name which cannot be had. The wheels are built as users build them: pip makes an
environment with what the package declares for its build, and takes the CMake and ninja of the
machine where they are new enough.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import tomllib
import venv
from collections.abc import Iterable, Sequence
from pathlib import Path

import dev
from dev import project_of

TEST_REQUIREMENTS = ("pytest", "hypothesis")
TEST_KIT = "bmt-testing"

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
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "packages", nargs="*", metavar="PKG", help=f"any of {', '.join(known)} (default: all)"
    )
    oldest_help = (
        "with the oldest versions that the packages declare, for building and for running, torch"
        " left out"
    )
    parser.add_argument("--oldest", action="store_true", help=oldest_help)
    options = parser.parse_args(arguments)
    names = options.packages or list(known)
    if unknown := [name for name in names if name not in known]:
        parser.error(f"no package is named {', '.join(unknown)}; there are {', '.join(known)}")
    results: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="bmt-isolated-") as temporary:
        wheels, constraints = Path(temporary, "wheels"), dev.REQUIREMENTS
        if options.oldest:
            constraints = Path(temporary, "oldest.txt")
            constraints.write_text("\n".join(oldest_versions(known.values())))
            print(constraints.read_text())
        needed = {
            sibling for name in names for sibling in [*installed_to_test(known[name]), "bmt-train"]
        }
        sources = [
            directory for directory in known.values() if project_of(directory)["name"] in needed
        ]
        builder = new_environment(Path(temporary, "builder"))
        command = [
            builder,
            "-m",
            "pip",
            "wheel",
            "--quiet",
            "--no-deps",
            "--wheel-dir",
            str(wheels),
            *map(str, sources),
        ]
        # A constraint in the environment holds where pip installs what a build needs too.
        constrained = {"PIP_CONSTRAINT": str(constraints)} if options.oldest else {}
        status = subprocess.run(
            command, cwd=temporary, env={**environment(), **constrained}
        ).returncode
        if status != 0:
            return status
        for name in names:
            with tempfile.TemporaryDirectory(prefix=f"{name}-", dir=temporary) as directory:
                results[name] = check_package(known[name], wheels, Path(directory), constraints)
    print()
    for name, result in results.items():
        print(
            f"{'ok    ' if result == 'ok' else 'FAILED'} {name}"
            + ("" if result == "ok" else f": {result}")
        )
    return 0 if set(results.values()) == {"ok"} else 1


def check_package(package: Path, wheels: Path, directory: Path, constraints_file: Path) -> str:
    """Install and test the package of directory ``package``, in ``directory``; return "ok" or
    what failed.
    """
    print(f"\n== {package.name}", flush=True)
    python = new_environment(directory / "venv")
    pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    ours = [str(wheel_of(name, wheels)) for name in installed_to_test(package)]
    constraints = ["--constraint", str(constraints_file)]
    tests = [
        "-c",
        str(dev.ROOT / "pyproject.toml"),
        "--rootdir",
        str(dev.ROOT),
        "-p",
        "no:cacheprovider",
        "-q",
    ]
    steps = {
        "installing": [*pip, *constraints, *ours, *TEST_REQUIREMENTS],
        "its tests": [python, "-m", "pytest", *tests, str(package / "tests")],
        "installing the facade": [*pip, "--no-deps", str(wheel_of("bmt-train", wheels))],
        "the facade's messages": [python, "-c", CHECK_FACADE],
    }
    for what, command in steps.items():
        # Not from the tree: `python -m` puts the current directory first on the path.
        if subprocess.run(command, cwd=directory, env=environment()).returncode != 0:
            return what
    return "ok"


def new_environment(directory: Path) -> str:
    """Make a virtual environment with nothing but pip, and return its Python."""
    venv.create(directory, with_pip=True)
    return str(directory / "bin" / "python")


def environment() -> dict[str, str]:
    """Return the environment of a user who has no ``.venv``: the machine's own programs, and builds
    that begin anew.
    """
    ours = {"SKBUILD_BUILD_DIR", "VIRTUAL_ENV"}
    inherited = {name: value for name, value in dev.environment().items() if name not in ours}
    return {
        **inherited,
        "PATH": os.environ.get("PATH", os.defpath),
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }


def oldest_versions(packages: Iterable[Path]) -> list[str]:
    """Return a pip constraint for the lowest version that each ``name>=version`` of ``packages``
    allows; torch stays as pinned.
    """
    lowest = {
        line for line in dev.REQUIREMENTS.read_text().splitlines() if line.startswith("torch==")
    }
    for package in packages:
        settings = tomllib.loads((package / "pyproject.toml").read_text())
        for requirement in [
            *settings["build-system"]["requires"],
            *settings["project"]["dependencies"],
        ]:
            name, found, version = requirement.partition(">=")
            if found and name != "torch":
                lowest.add(f"{name}=={version}")
    return sorted(lowest)


def installed_to_test(package: Path) -> list[str]:
    """Return the names of our packages that the tests of ``package`` run with, itself first."""
    groups = tomllib.loads((package / "pyproject.toml").read_text()).get("dependency-groups", {})
    names = siblings_of(package)
    for requirement in [TEST_KIT, *groups.get("test", [])]:
        sibling = directories_by_name()[requirement.partition("==")[0]]
        names += [name for name in siblings_of(sibling) if name not in names]
    return names


def directories_by_name() -> dict[str, Path]:
    """Return the directories of our packages by the names of the projects, of which one has another
    name than its directory.
    """
    return {project_of(directory)["name"]: directory for directory in dev.package_directories()}


def siblings_of(package: Path) -> list[str]:
    """Return the names of ``package`` itself and of the packages of ours that it requires, and
    those require.
    """
    project = project_of(package)
    names = [project["name"]]
    for requirement in project["dependencies"]:
        match = re.match(r"[A-Za-z0-9-]+", requirement)
        sibling = directories_by_name().get(match[0] if match else requirement)
        if sibling is not None:
            names += [name for name in siblings_of(sibling) if name not in names]
    return names


def wheel_of(name: str, wheels: Path) -> Path:
    """Return the wheel of our package ``name``. A path, so that no index is asked about a package
    of that name.
    """
    (wheel,) = wheels.glob(f"{name.replace('-', '_')}-*.whl")
    return wheel


if __name__ == "__main__":
    sys.exit(main())
