"""One run at a time writes checkpoints to a directory: its rank 0 locks a file there, and deletes
it at ``shutdown()``.

The lock is the operating system's. It ends with the process that holds it, however that process
ends. On NFS, the lock of a host that lost its power ends when the server gives it up, after a
minute or two. Where locks hold on their own host only, the text in the file tells of a run on
another host.
"""

from __future__ import annotations

import fcntl
import os
import socket
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from bmt_checkpoint.atomic import cannot_write
from bmt_checkpoint.training_folder import refuse_file
from bmt_core.comm.collective_section import collective_section
from bmt_core.errors import CheckpointError
from bmt_core.run.runtime import current, is_initialized, world_group
from bmt_core.user_warnings import warn_user

LOCK_FILE = ".written-by"
_locked: dict[Path, int] = {}  # the descriptors of files that this process has locked


def lock_checkpoints(dir: str | os.PathLike[str]) -> None:
    """Let no other run save checkpoints to ``dir`` until ``shutdown()``. Collective.

    The first :func:`save_checkpoint` does the same. Called before the first step, this function
    refuses a second run before it trains. A run that only loads from ``dir`` does not call it.
    Rank 0 holds a lock on the file ``dir/.written-by``, and makes ``dir`` if it is not there. The
    lock of a process that died is free.

    Raises :class:`CheckpointError` on every rank if another run has the lock; the error names its
    process and host, and when it took the lock. The same if rank 0 cannot write to ``dir``.
    """
    folder = Path(dir)
    with collective_section(world_group(), f"locking {folder}"):
        refuse_file(folder)
        if world_group().rank == 0:
            lock_run_directory(folder)


def lock_run_directory(folder: Path) -> None:
    """Let no other process write checkpoints to ``folder`` until this run's ``shutdown()``. Rank 0
    calls it; not collective.

    Raises :class:`CheckpointError` if another process has the lock.
    """
    path = Path(os.path.realpath(folder)) / LOCK_FILE
    if path in _locked:
        if _is_open_file(path, _locked[path]):
            return
        os.close(_locked.pop(path))  # somebody has deleted the file
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = _open_and_lock(path)
        # The run that had the lock has just ended, and deleted the file.
        while not _is_open_file(path, descriptor):
            os.close(descriptor)
            descriptor = _open_and_lock(path)
        _locked[path] = descriptor
        _warn_of_other_host(path, descriptor)
        started = datetime.now().astimezone().isoformat(timespec="seconds")
        os.ftruncate(descriptor, 0)
        os.pwrite(
            descriptor,
            f"process {os.getpid()} on host {socket.gethostname()} since {started}\n".encode(),
            0,
        )
    except OSError as error:
        raise CheckpointError(cannot_write(path, error)) from error
    if is_initialized() and _unlock_all not in current().at_shutdown:
        current().at_shutdown.append(_unlock_all)


def _open_and_lock(path: Path) -> int:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        writer = _read(descriptor) or "another process"
        os.close(descriptor)
        raise CheckpointError(
            f"Another run writes its checkpoints to {path.parent}: {writer}. Two runs would"
            " overwrite each other's files. Stop that one, or give this one another directory."
        ) from error
    except OSError as error:
        warn_user(
            f"The file system of {path.parent} has no locks ({error.strerror}): if a second run"
            " writes its checkpoints there, too, it is not noticed."
        )
    return descriptor


def _warn_of_other_host(path: Path, descriptor: int) -> None:
    """Warn if a run of another host has left ``path``: on some file systems a lock holds on its own
    host only.
    """
    writer = _read(descriptor)
    if writer and f" on host {socket.gethostname()} " not in writer:
        warn_user(
            f"{path} was left by {writer}, and is taken over. Make sure that it has ended: not"
            " every file system shows the locks of other hosts, and two runs would overwrite each"
            " other's files."
        )


def _read(descriptor: int) -> str:
    return os.pread(descriptor, 300, 0).decode(errors="replace").strip()


def _is_open_file(path: Path, descriptor: int) -> bool:
    return path.exists() and os.path.samestat(path.stat(), os.fstat(descriptor))


def _unlock_all() -> None:
    for path, descriptor in _locked.items():
        with suppress(OSError):
            if _is_open_file(path, descriptor):
                path.unlink()
    _close_all()


def _close_all() -> None:
    while _locked:
        os.close(_locked.popitem()[1])


# A forked process, such as a worker of a DataLoader, may outlive this one. It must not keep
# the lock.
os.register_at_fork(after_in_child=_close_all)
