"""``CallHistory``: the last collective calls of a rank, in a file that outlives the process, for
``bmt hang``.

[Note: the file of a call history]
A rank maps a file of fixed size into memory and writes every call that it enters into the next of
:data:`RECORDS` records. That is no system call, and Linux keeps what was written if the process is
killed. A record begins and ends with its serial number, so that one that was written by halves is
noticed. Before the records lies what :class:`CallWatch` writes once in each period: the time, the
call for whose end the rank waits, and the Python stack of a rank that makes no calls. So an entered
call is one write. The number of the last call in each group remains known when the records of that
group are overwritten. After the mapped part follow lines of JSON: first the run and
the process, then each group when it is made, and at last how the process ended.
"""

from __future__ import annotations

import json
import mmap
import os
import socket
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bmt_core.errors import ConfigError, cause_of
from bmt_core.torch_internals import backward_pass
from bmt_watch.rank_states import Call

RECORDS = 512
"""How many calls of a rank are kept."""
Group = tuple[str, tuple[int, ...]]
"""The name of a group and its members."""
_MAGIC, _VERSION = b"bmtcalls", 1
_HEAD = struct.Struct("<8sQ")  # magic, version
# Time, serial numbers of the last call before and of the call that is waited for, since when.
_SIGN = struct.Struct("<dQQd")
_STACK = struct.Struct("<QQ4000s")  # serial number of the last call before, length, text
_GROUPS = 1024  # the calls of later groups are not recorded
# Serial number, when entered, number, step, how many characters of the text all ranks share, group,
# whether in a backward pass, text, serial number.
_RECORD = struct.Struct("<QdQIIH?5x208sQ")
_SIGN_AT, _STACK_AT, _NUMBERS_AT = 16, 64, 4096
_RECORDS_AT = _NUMBERS_AT + 8 * _GROUPS
_MAPPED = _RECORDS_AT + RECORDS * _RECORD.size
_LINES = 65536  # bytes that are kept free for lines


class CallHistory:
    """Records the calls of this rank: see [Note: the file of a call history].

    Makes the file ``directory / run / f"rank-{rank}.calls"``. ``run`` names the run, the same on
    all ranks; ``period`` is after how many seconds a rank gives a sign of life. Raises
    :class:`ConfigError` if the file cannot be made.
    """

    def __init__(
        self, directory: str | Path, run: str, *, rank: int, world_size: int, period: float
    ) -> None:
        self.training_step = 1
        """The number of the present step, which is recorded with each call."""
        self._serial = 0
        self._groups = 0
        path = Path(directory, run, f"rank-{rank}.calls")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("wb+", buffering=0)
            # Not a hole: if the disk gets full, writing to the memory would end the process.
            self._file.write(bytes(_MAPPED + _LINES))
            self._file.seek(_MAPPED)
            self._memory = mmap.mmap(self._file.fileno(), _MAPPED)
        except (OSError, ValueError) as error:  # ValueError: the file could not be written whole
            raise ConfigError(
                f"Rank {rank} cannot record its calls in {path}: {error}. BMT_CALL_HISTORY must"
                " name a directory in which every rank can write."
            ) from error
        self._numbers = memoryview(self._memory)[_NUMBERS_AT:_RECORDS_AT].cast("Q")
        host, process = socket.gethostname(), os.getpid()
        self._append(run=run, rank=rank, world_size=world_size, period=period)
        self._append(host=host, process=process)
        self.give_sign()
        _HEAD.pack_into(self._memory, 0, _MAGIC, _VERSION)

    def add_group(self, name: str, ranks: Sequence[int]) -> int:
        """Return the index of a new group, for :meth:`enter`."""
        if self._groups < _GROUPS:
            self._append(group=name, ranks=runs_of(ranks))
        self._groups += 1
        return self._groups - 1

    def enter(self, group: int, number: int, text: bytes, compared: int) -> int:
        """Record that this rank enters call ``number`` of ``group``, and return the record's
        serial number.

        The first ``compared`` characters of ``text`` must be the same on all ranks. ``number`` is 0
        for a send or a receive, which ranks do not number.
        """
        if group >= _GROUPS:
            return 0
        self._serial = serial = self._serial + 1
        if number:
            self._numbers[group] = number
        at = _RECORDS_AT + serial % RECORDS * _RECORD.size
        is_in_backward = backward_pass() >= 0
        where = number, self.training_step, compared, group, is_in_backward
        _RECORD.pack_into(self._memory, at, serial, time.time(), *where, text, serial)
        return serial

    def give_sign(self, waited_for: int = 0, since: float = 0.0, stack: str = "") -> None:
        """Record that the process lives, and where: the call that it waits for, since when (as
        ``time.time()``), or its Python ``stack`` if it makes no calls.
        """
        if stack:
            data = stack.encode()[-4000:]
            _STACK.pack_into(self._memory, _STACK_AT, self._serial, len(data), data)
        _SIGN.pack_into(self._memory, _SIGN_AT, time.time(), self._serial, waited_for, since)

    def close(self, ended: str) -> None:
        """Record that the process leaves the run, and the error that ends it, or "". The memory
        stays mapped, because other threads may still write.
        """
        self._append(ended=ended, when=time.time())
        self._file.close()

    def _append(self, **values: object) -> None:
        self._file.write(json.dumps(values).encode() + b"\n")


@dataclass(frozen=True, kw_only=True)
class RecordedCall:
    """One record of a history. ``compared`` is the part of the call's text that is the same on all
    ranks; ``entered`` and ``waited`` are in seconds since 1970. ``waited`` is when the rank began
    to wait for the end of the call; None if it did not wait at its last sign of life.
    """

    serial: int
    call: Call
    compared: str
    entered: float
    waited: float | None
    step: int
    is_in_backward: bool

    @property
    def group(self) -> Group:
        """The group of the call."""
        return self.call.group, self.call.ranks


@dataclass(frozen=True, kw_only=True)
class RankHistory:
    """What a file has of a rank: its process, the number of its last call in each group, its last
    calls in order, and how the process ended; ``ended`` is None if it did not say so.

    ``stack`` is the Python stack since the last call; ``last_sign`` is when the process was alive.
    """

    run: str
    rank: int
    world_size: int
    period: float
    host: str
    process: int
    numbers: Mapping[Group, int]
    calls: Sequence[RecordedCall]
    stack: str
    last_sign: float
    ended: str | None

    @classmethod
    def read(cls, path: Path) -> RankHistory:
        """Read the file of a rank that runs or has ended. Raises :class:`ConfigError` if it is
        none.
        """
        data = path.read_bytes()
        magic, version = _HEAD.unpack_from(data.ljust(_HEAD.size, b"\0"))
        if magic != _MAGIC:
            raise ConfigError(f"{path} is not a call history of bmt, or its rank has just begun.")
        if version != _VERSION:
            raise ConfigError(
                f"{path} has version {version} of the call history, and this bmt reads version"
                f" {_VERSION}. Read it with the bmt that the run had."
            )
        try:
            return cls._of(data)
        except (LookupError, TypeError, ValueError, struct.error) as error:
            raise ConfigError(
                f"{path} is cut off or damaged ({cause_of(error)}): it has {len(data)} bytes. Copy"
                " it once more."
            ) from error

    @classmethod
    def _of(cls, data: bytes) -> RankHistory:
        # The last line may be one that is being written.
        lines = [json.loads(line) for line in data[_MAPPED:].rstrip(b"\0").split(b"\n")[:-1]]
        about: dict[str, Any] = {**lines[0], **lines[1]}
        groups = [(line["group"], ranks_of(line["ranks"])) for line in lines if "group" in line]
        numbers = memoryview(data)[_NUMBERS_AT:_RECORDS_AT].cast("Q")
        calls = sorted(_records(data, groups), key=lambda record: record.serial)
        serial, length, stack = _STACK.unpack_from(data, _STACK_AT)
        (sign, *_), end = _SIGN.unpack_from(data, _SIGN_AT), lines[-1]
        is_new = not calls or serial == calls[-1].serial
        return cls(
            **about,
            numbers={group: n for group, n in zip(groups, numbers, strict=False) if n},
            calls=calls,
            stack=stack[:length].decode(errors="replace") if is_new else "",
            last_sign=max([sign, *(record.entered for record in calls), end.get("when", 0.0)]),
            ended=end.get("ended"),
        )


def _records(data: bytes, groups: Sequence[Group]) -> Iterator[RecordedCall]:
    _, newest, waited_for, since = _SIGN.unpack_from(data, _SIGN_AT)
    records = list(_RECORD.iter_unpack(data[_RECORDS_AT:_MAPPED]))
    has_gone_on = any(record[0] > newest for record in records)  # and no longer waits
    for record in records:
        serial, entered, number, step, compared, group, is_in_backward, text, last = record
        if serial != last or serial == 0:
            continue  # never written, or by halves
        name, ranks = groups[group]
        shown = text.rstrip(b"\0").decode(errors="replace")
        yield RecordedCall(
            serial=serial,
            call=Call(group=name, ranks=ranks, number=number, text=shown),
            compared=shown[:compared],
            entered=entered,
            waited=since if serial == waited_for and not has_gone_on else None,
            step=step,
            is_in_backward=is_in_backward,
        )


def runs_of(ranks: Sequence[int]) -> list[list[int]]:
    """Return ``ranks``, which grow, as runs of consecutive ones: the first and the last of each.

    >>> runs_of([0, 1, 2, 3, 8])
    [[0, 3], [8, 8]]
    """
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return runs


def ranks_of(runs: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Undo :func:`runs_of`."""
    return tuple(rank for first, last in runs for rank in range(first, last + 1))
