"""Writing files and directories atomically: after a crash there is the old one or the new one, and
it is complete.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bmt_core.errors import CheckpointError


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path. The file written there replaces ``path`` at the end of the
    ``with`` statement.

    If its body raises, ``path`` stays as it was. If ``path`` is a symbolic link, its target is
    replaced. An OSError is raised as :class:`CheckpointError`.
    """
    path = Path(os.path.realpath(path))
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield temporary
            flush(temporary)
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        flush(path.parent)
    except OSError as error:
        raise CheckpointError(
            f"{cannot_write(path, error)} What was there is unchanged."
        ) from error


@contextmanager
def replacing_directory(path: Path) -> Iterator[Path]:
    """Yield a temporary empty directory, which replaces ``path`` at the end of the ``with``
    statement: see :func:`replacing`.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        try:
            yield temporary
            publish_directory(temporary, path)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
    except OSError as error:
        raise CheckpointError(
            f"{cannot_write(path, error)} What was there is unchanged."
        ) from error


def cannot_write(path: Path, error: OSError) -> str:
    """Return the first sentence of the message that ``path`` cannot be written, because
    of ``error``.

    >>> cannot_write(Path("model.pt"), OSError(errno.ENOSPC, "No space left on device"))
    'The disk is full: cannot write model.pt (No space left on device).'
    """
    why = error.strerror or str(error)
    reasons = {
        errno.ENOSPC: "The disk is full",
        errno.EDQUOT: "The disk quota is used up",
        errno.EROFS: "The disk is read-only",
    }
    if error.errno in reasons:
        return f"{reasons[error.errno]}: cannot write {path} ({why})."
    return f"Cannot write {path}: {why}."


def publish_directory(temporary: Path, final: Path) -> None:
    """Rename ``temporary``, whose files are on disk, to ``final``, and delete the directory that
    was there.

    Directories cannot be exchanged in one operation, so the old one is renamed first. If the
    process stops between the two renames, the old one is at :func:`previous_of` ``final``.
    """
    previous = previous_of(final)
    flush(temporary)
    if final.exists():
        shutil.rmtree(previous, ignore_errors=True)
        os.rename(final, previous)
    os.rename(temporary, final)
    flush(final.parent)
    shutil.rmtree(previous, ignore_errors=True)


def previous_of(final: Path) -> Path:
    """Return the path to which :func:`publish_directory` renames the directory that it replaces.

    >>> previous_of(Path("runs/step-5")).name
    'step-5.old'
    """
    return final.with_name(f"{final.name}.old")


def flush(path: Path) -> None:
    """Wait until the file or directory ``path`` is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
