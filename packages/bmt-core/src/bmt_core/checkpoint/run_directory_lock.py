"""One run at a time writes checkpoints to a directory: its rank 0 holds a lock of the operating system on a file there.

The lock ends with the process that holds it, however that process ends. On NFS, the lock of a host that lost its power ends
when the server gives it up, after a minute or two.
"""

from __future__ import annotations

import fcntl
import os
import socket
import warnings
from datetime import datetime
from pathlib import Path

from bmt_core.checkpoint.atomic import cannot_write
from bmt_core.errors import CheckpointError
from bmt_core.run.runtime import current, is_initialized

LOCK_FILE = ".written-by"
_locked: dict[str, int] = {}  # directory: the descriptor of its file


def lock_run_directory(folder: Path) -> None:
    """Let no other process write checkpoints to ``folder`` until this run's ``shutdown()``. Rank 0 calls it; not collective.

    Raises :class:`CheckpointError` if another process has the lock.
    """
    key, path = os.path.realpath(folder), folder / LOCK_FILE
    if key in _locked:
        if path.exists() and os.path.samestat(os.fstat(_locked[key]), path.stat()):
            return
        os.close(_locked.pop(key))  # somebody deleted the file
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise CheckpointError(cannot_write(path, error)) from error
    try:
        _lock(descriptor, folder)
        os.ftruncate(descriptor, 0)
        started = datetime.now().astimezone().isoformat(timespec="seconds")
        os.pwrite(descriptor, f"process {os.getpid()} on host {socket.gethostname()} since {started}\n".encode(), 0)
    except OSError as error:
        os.close(descriptor)
        raise CheckpointError(cannot_write(path, error)) from error
    except CheckpointError:
        os.close(descriptor)
        raise
    _locked[key] = descriptor
    if is_initialized() and _unlock_all not in current().at_shutdown:
        current().at_shutdown.append(_unlock_all)


def _lock(descriptor: int, folder: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        writer = os.pread(descriptor, 300, 0).decode(errors="replace").strip() or "another process"
        raise CheckpointError(
            f"Another run writes its checkpoints to {folder}: {writer}. Two runs would overwrite each other's files."
            " Stop that one, or give this one another directory."
        ) from error
    except OSError as error:
        warnings.warn(
            f"The file system of {folder} has no locks ({error.strerror}): if a second run wrote its checkpoints there, too, nobody"
            " would notice.",
            stacklevel=2,
        )


def _unlock_all() -> None:
    for key in list(_locked):
        os.close(_locked.pop(key))


# A forked process, such as a worker of a DataLoader, may outlive this one. It must not keep the lock.
os.register_at_fork(after_in_child=_unlock_all)
