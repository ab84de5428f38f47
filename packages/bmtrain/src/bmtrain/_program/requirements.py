"""``unmet_requirements``: what an installed distribution requires and this environment does
not have.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator

from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import InvalidVersion


def unmet_requirements(distribution: str) -> Iterator[str]:
    """Yield a text for each requirement of ``distribution`` that is not met, and for each that
    cannot be read.

    Requirements of extras are left out, because nobody knows which extras were asked for.
    """
    for text in importlib.metadata.requires(distribution) or ():
        try:
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                yield from _unmet(requirement)
        except (InvalidRequirement, InvalidVersion) as error:
            yield f"its requirement {text!r} cannot be checked: {str(error).splitlines()[0]}"


def _unmet(requirement: Requirement) -> Iterator[str]:
    needed = f"{requirement.name}{requirement.specifier}"
    try:
        found = importlib.metadata.version(requirement.name)
    except importlib.metadata.PackageNotFoundError:
        yield f"needs {needed}, which is not installed"
        return
    if not requirement.specifier.contains(found, prereleases=True):
        yield f"needs {needed}, and {requirement.name} {found} is installed"
