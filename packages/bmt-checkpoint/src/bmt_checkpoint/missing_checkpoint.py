"""``lies_there``: for errors about a checkpoint that is not where it was looked for."""

from __future__ import annotations

import os
from pathlib import Path

_NAMES = 8


def lies_there(path: Path) -> str:
    """Return a sentence that says what the directory ``path`` holds. If there is none, it says what
    the nearest one above holds.
    """
    searched = path.absolute()
    folder = next(each for each in (searched, *searched.parents) if each.is_dir())
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        return f"{folder} cannot be read: {error.strerror}."
    more = f" and {len(names) - _NAMES} more" if len(names) > _NAMES else ""
    holds = f"holds {', '.join(names[:_NAMES])}{more}" if names else "is empty"
    if searched.is_file() or folder == searched:
        return f"{folder} {holds}."
    return f"{searched} does not exist; {folder} {holds}."
