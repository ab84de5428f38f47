#!/usr/bin/env python3
"""One version for all packages, exact pins between them: ``--check`` that it is so, or write a NEW
version everywhere.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

VERSION = re.compile(r'^(version = ")([^"]*)(")', re.MULTILINE)
PIN = re.compile(r'("bmt-[a-z]+(?:\[[a-z,]*\])?)([^"\[\]]*)(")')
"""A requirement on a sibling, in quotes: group 2 is all that follows the name and the extras."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Check, or write, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only say what is wrong")
    parser.add_argument("--root", type=Path, default=ROOT, help=argparse.SUPPRESS)
    parser.add_argument("new", nargs="?", metavar="NEW", help="the version to write, such as 0.2.0")
    options = parser.parse_args(arguments)
    if options.check == (options.new is not None):
        parser.error("give either --check or a NEW version")
    files = sorted(options.root.glob("packages/*/pyproject.toml"))
    if options.check:
        problems = find_problems(
            {str(path.relative_to(options.root)): path.read_text() for path in files}
        )
        print(
            "\n".join(problems) if problems else f"{len(files)} packages, one version, exact pins"
        )
        return 1 if problems else 0
    if not re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc)\d+)?", options.new):
        parser.error(f"{options.new} is not a version such as 0.2.0 or 1.0.0rc1")
    for path in files:
        path.write_text(with_version(path.read_text(), options.new))
    print(
        f"{len(files)} packages now have version {options.new}; write its changes into the page:"
        f" pipx run towncrier build --version {options.new}"
    )
    return 0


def find_problems(texts: dict[str, str]) -> list[str]:
    """Return a line for each package file without a version, with another version, or with a
    loose pin.

    >>> one = 'version = "0.1.0"'
    >>> find_problems({"a": one, "b": one + '\\ndependencies = ["bmt-core>=0.1"]'})
    ["b: 'bmt-core>=0.1' should be 'bmt-core==0.1.0'"]
    """
    versions = {name: match[2] for name, text in texts.items() if (match := VERSION.search(text))}
    problems = [f"{name}: no line 'version = \"...\"'" for name in texts if name not in versions]
    if len(set(versions.values())) > 1:
        problems += [f"{name}: version {version}" for name, version in versions.items()]
    for name, version in versions.items():
        for start, pin, _ in PIN.findall(_requirements(texts[name])):
            if pin != f"=={version}":
                problems.append(f"{name}: '{start[1:]}{pin}' should be '{start[1:]}=={version}'")
    return problems


def with_version(text: str, version: str) -> str:
    """Return the text of a package's ``pyproject.toml`` with ``version`` and with its pins of
    siblings changed to it.

    >>> text = 'name = "bmt-zero"\\nversion = "0.1.0"\\ndependencies = ["bmt-core==0.1.0"]'
    >>> print(with_version(text, "0.2.0"))
    name = "bmt-zero"
    version = "0.2.0"
    dependencies = ["bmt-core==0.2.0"]
    """
    text = VERSION.sub(rf"\g<1>{version}\g<3>", text)
    requirements = _requirements(text)
    return (
        text.replace(requirements, PIN.sub(rf"\g<1>=={version}\g<3>", requirements))
        if requirements
        else text
    )


def _requirements(text: str) -> str:
    """Return the part of the file that lists requirements: from ``dependencies`` to the first table
    without any.
    """
    start = text.find("dependencies = [")
    if start < 0:
        return ""
    end = re.compile(
        r"^\[(?!project\.optional-dependencies|dependency-groups)", re.MULTILINE
    ).search(text, start)
    return text[start : end.start() if end else None]


if __name__ == "__main__":
    sys.exit(main())
