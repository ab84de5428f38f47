"""Files and directories that appear whole or not at all, whenever the process or the machine stops."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bmt_core.errors import CheckpointError


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside ``path``; the file written there takes the place of ``path`` when the section
    ends well.

    Until then, and if it raises, ``path`` is what it was. A link is followed: its target is replaced. OSError becomes
    :class:`CheckpointError`.
    """
    path = Path(os.path.realpath(path))
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield temporary
            _flush(temporary)
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        _flush(path.parent)
    except OSError as error:
        raise CheckpointError(
            f"Cannot write {path}: {error.strerror or error}. What was there is unchanged."
        ) from error


def publish_directory(temporary: Path, final: Path) -> None:
    """Rename ``temporary``, whose files are flushed, to ``final``; what stood there goes afterwards.

    A directory cannot be exchanged in one operation. If the process stops between the two renames, the previous one
    is at :func:`previous_of` ``final``.
    """
    previous = previous_of(final)
    _flush(temporary)
    if final.exists():
        shutil.rmtree(previous, ignore_errors=True)
        os.rename(final, previous)
    os.rename(temporary, final)
    _flush(final.parent)
    shutil.rmtree(previous, ignore_errors=True)


def previous_of(final: Path) -> Path:
    """Return where :func:`publish_directory` keeps the directory that it replaces.

    >>> previous_of(Path("runs/step-5")).name
    'step-5.old'
    """
    return final.with_name(f"{final.name}.old")


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
