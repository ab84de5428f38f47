"""Find the installed plugins: entry points of the group ``bmt``, sorted by name, without those that
the user turned off.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterable, Mapping
from importlib.metadata import EntryPoint, entry_points

from bmt_core.errors import PluginError, unknown_name

GROUP = "bmt"
DISABLE_VARIABLE = "BMT_DISABLE_PLUGINS"
CORE_PLUGIN = "bmt-core"


def installed_entry_points() -> list[EntryPoint]:
    """Return every plugin's entry point, sorted by (name, distribution).

    ``importlib.metadata`` yields file-system order, which differs between machines, and all ranks
    need the same order.
    """
    return list(_entry_points_in(tuple((directory, _changed(directory)) for directory in sys.path)))


@functools.lru_cache(maxsize=1)
def _entry_points_in(path: tuple[tuple[str, int], ...]) -> list[EntryPoint]:
    """Read the metadata of all installed packages, which takes milliseconds; cached until a
    directory in ``path`` changes.
    """
    found = list(entry_points(group=GROUP))
    if all(entry.name != CORE_PLUGIN for entry in found):
        # The core's plugin is loaded even without metadata, as in a source tree on PYTHONPATH or a
        # frozen program.
        found.append(EntryPoint(CORE_PLUGIN, "bmt_core.core_plugin", GROUP))
    return sorted(found, key=lambda entry: (entry.name, distribution_of(entry)))


def _changed(directory: str) -> int:
    """The time in ns when a file was last added to ``directory`` or removed from it; 0 without such
    a directory.
    """
    try:
        return os.stat(directory or ".").st_mtime_ns
    except OSError:
        return 0


def choose(
    entries: Iterable[EntryPoint], disabled: Iterable[str]
) -> tuple[list[EntryPoint], list[PluginError]]:
    """Return the ``entries`` to load, and errors for names that two plugins have and for disabled
    names that none has.
    """
    by_name: dict[str, list[EntryPoint]] = {}
    for entry in entries:
        by_name.setdefault(entry.name, []).append(entry)
    disabled = set(disabled)
    problems = [
        PluginError(
            f"{DISABLE_VARIABLE} names a plugin that is not installed:"
            f" {unknown_name('plugin', name, by_name)}"
        )
        for name in sorted(disabled - set(by_name))
    ]
    chosen = []
    for name, candidates in by_name.items():
        if name in disabled:
            continue
        if len(candidates) > 1:
            owners = " and ".join(distribution_of(entry) or entry.value for entry in candidates)
            problems.append(
                PluginError(
                    f"Two plugins are named {name!r}, of {owners}. Uninstall one of them, or turn"
                    f" off both: {DISABLE_VARIABLE}={name}."
                )
            )
        else:
            chosen.append(candidates[0])
    return chosen, problems


def disabled_by_environment(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Return the names in ``BMT_DISABLE_PLUGINS``, which are separated by commas.

    >>> disabled_by_environment({"BMT_DISABLE_PLUGINS": "lion, recording,"})
    ['lion', 'recording']
    """
    return [
        name.strip() for name in environment.get(DISABLE_VARIABLE, "").split(",") if name.strip()
    ]


def distribution_of(entry: EntryPoint) -> str:
    """Return ``"name version"`` of the distribution that the entry point is from, or an
    empty text.
    """
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist is not None else ""
