"""``CallLog``: the last calls of this rank; and ``RankCalls``: what a rank has shown or recorded.

[Note: the log of calls]
The last :data:`RECORDS` calls of a rank are records of fixed size in a ring, with the number of its
last call in each group, which remains known when the records of that group are overwritten, and its
:class:`RankState`, as it was once in each period. A rank that waits for long shows the others all
of it through the store. With ``BMT_CALL_HISTORY`` the ring is a file that is mapped into memory,
which ``bmt hang`` reads: writing a call is no system call, and Linux keeps what was written if the
process is killed. A record begins and ends with its serial number, so that one that was written by
halves is noticed; of the state there are two, of which one is being written. After the mapped part
follow lines of JSON: first the run and the process, then each group when it is made.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple
from weakref import ref

from bmt_core.errors import ConfigError, cause_of
from bmt_watch.rank_states import Call, RankState, made, ranks_of, runs_of

RECORDS = 1024
"""How many calls of a rank are kept."""
NOT_COMPARED, UNKNOWN = -2, -1
"""In place of the rank that made a call first."""
Group = tuple[str, tuple[int, ...]]
"""The name of a group and its members."""
_MAGIC, _VERSION = b"bmtcalls", 2
_HEAD = struct.Struct("<8sII")  # magic, version, which of the two states is valid
_STATE_BYTES = 32768
_GROUPS = 1024
# Serial number, number, step, how many characters of the text all ranks share, group, text and
# place, serial number.
_RECORD = struct.Struct("<QQIII304sQ")
_NUMBERS_AT = _HEAD.size + 2 * _STATE_BYTES
_TIMES_AT = _NUMBERS_AT + 8 * _GROUPS
_FIRSTS_AT = _TIMES_AT + 8 * RECORDS
_RECORDS_AT = _FIRSTS_AT + 4 * RECORDS
_MAPPED = _RECORDS_AT + RECORDS * _RECORD.size
_LINES = 65536  # bytes that are kept free for lines


class Text(NamedTuple):
    """What is shown of a call, and what of that is compared; where in the model it is made; and
    what its record has of that, which is counted here once for all calls of this text.
    """

    shown: str
    compared: str
    place: str
    data: bytes
    length: int

    @classmethod
    def of(cls, shown: str, compared: str, place: str) -> Text:
        """Return the text of a call."""
        return cls(shown, compared, place, f"{shown}\n{place}".encode(), len(compared))


class CallLog:
    """The calls of this rank, and what it does now: the main thread writes it, and
    :class:`CallWatch` reads it. See [Note: the log of calls].

    ``directory`` is where to record them, in the file ``run / f"rank-{rank}.calls"``. ``run`` names
    the run, the same on all ranks; ``period`` is after how many seconds a rank gives a sign of
    life. Raises :class:`ConfigError` if the file cannot be made.
    """

    def __init__(
        self,
        directory: str | Path | None = None,
        run: str = "",
        *,
        rank: int = 0,
        world_size: int = 1,
        period: float = 1.0,
    ) -> None:
        # Of calls that this rank makes.
        self.groups: list[Group] = []
        self.queued: dict[int, tuple[int, Text]] = {}
        """The last call that was queued on the GPU and not compared, by the index of its group."""
        self.last: Call | None = None
        """The last call that was compared, or the last send or receive."""
        self.under_way: dict[int, ref[Any]] = {}
        """The works of compared calls that may not have ended, by serial number."""
        # Of what it does now.
        self.waiting: tuple[Call, float] | None = None
        """The call for whose end this rank waits, and since when."""
        self.interrupt: Callable[[], None] | None = None
        """Ends this wait, by an error."""
        self.meeting: str | None = None
        """The key of the store for which the main thread waits, until all members of a group have
        entered a call.
        """
        self.step = 0
        """The number of a pipeline's present step."""
        self.given_up: tuple[str, tuple[int, ...]] = "", ()
        """The error for which this rank makes no more calls in its present step, but those with the
        group of these ranks.
        """
        self.training_step = 1
        """The number of the present step of the first optimizer that is stepped."""
        self.serial = 0
        """That of the last record."""
        self._counted = 0  # this optimizer
        self._slot = 0
        self._lines = b""
        self._file: Any = None
        self._memory: Any = bytearray(_MAPPED)
        if directory is not None:
            self._file, self._memory = _mapped_file(Path(directory, run, f"rank-{rank}.calls"))
        memory = memoryview(self._memory)
        self.numbers = memory[_NUMBERS_AT:_TIMES_AT].cast("Q")
        """That of the last call of each group."""
        self._times = memory[_TIMES_AT:_FIRSTS_AT].cast("d")
        self.firsts = memory[_FIRSTS_AT:_RECORDS_AT].cast("i")
        """The rank that made the call first, for each record."""
        about = {"run": run, "rank": rank, "world_size": world_size, "period": period}
        self._append(**about, process=os.getpid())
        self.write_state(RankState(time=time.time()))

    def add_group(self, name: str, ranks: Sequence[int]) -> int:
        """Return the index of a new group, for :meth:`add`."""
        assert len(self.groups) < _GROUPS
        self.groups.append((name, tuple(ranks)))
        self._append(group=name, ranks=runs_of(ranks))
        return len(self.groups) - 1

    def add(self, group: int, number: int, text: Text, first: int) -> int:
        """Record that this rank enters call ``number`` of ``group``, 0 for a send or a receive, and
        return the record's serial number. ``first`` is the rank that made the call first.
        """
        self.serial = serial = self.serial + 1
        if number:
            self.numbers[group] = number
        slot = serial % RECORDS
        self._times[slot], self.firsts[slot] = time.time(), first
        at, step, data = _RECORDS_AT + slot * _RECORD.size, self.training_step, text.data
        _RECORD.pack_into(self._memory, at, serial, number, step, text.length, group, data, serial)
        return serial

    def end_of_step(self, optimizer: object, *_: object) -> None:
        """Count the steps of the first optimizer that is stepped. A hook of torch's optimizers."""
        self._counted = self._counted or id(optimizer)
        if id(optimizer) == self._counted:
            self.training_step += 1

    def entered(self) -> dict[str, int]:
        """Return the number of the last call in each group."""
        pairs = zip(list(self.groups), self.numbers, strict=False)
        return {name: number for (name, _), number in pairs if number}

    def last_on_device(self) -> list[Call]:
        """Return the last call of each group that was queued on the GPU and not compared."""
        return [
            Call(*self.groups[group], number, text.shown, 0, text.place)
            for group, (number, text) in sorted(self.queued.copy().items())
        ]

    def calls_under_way(self) -> tuple[int, ...]:
        """Return the serial numbers of the compared calls that are not known to have ended."""
        works = [(serial, work()) for serial, work in list(self.under_way.items())]
        # None: nobody has waited for it.
        return tuple(each for each, work in works if work is None or not work.is_completed())

    def write_state(self, state: RankState) -> None:
        """Keep the ``state`` of this rank."""
        text = replace(state, on_device=()).to_json().encode()
        if len(text) >= _STATE_BYTES:  # the ranks of calls, of which there are thousands
            waiting = state.waiting and replace(state.waiting, ranks=())
            state = replace(state, on_device=(), last=None, waiting=waiting, under_way=())
            text = state.to_json().encode()[: _STATE_BYTES - 1]
        self._slot = 1 - self._slot
        at = _HEAD.size + self._slot * _STATE_BYTES
        self._memory[at : at + len(text) + 1] = text + b"\0"
        _HEAD.pack_into(self._memory, 0, _MAGIC, _VERSION, self._slot)

    def to_bytes(self) -> bytes:
        """Return all that is kept."""
        return bytes(self._memory) + self._lines

    def close(self) -> None:
        """Close the file. The memory stays mapped, because other threads may still write."""
        if self._file is not None:
            self._file.close()

    def _append(self, **values: object) -> None:
        line = json.dumps(values).encode() + b"\n"
        self._lines += line
        if self._file is not None:
            self._file.write(line)


def _mapped_file(path: Path) -> tuple[Any, Any]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("wb+", buffering=0)
        # Not a hole: if the disk gets full, writing to the memory would end the process.
        file.write(bytes(_MAPPED + _LINES))
        file.seek(_MAPPED)
        return file, mmap.mmap(file.fileno(), _MAPPED)
    except (OSError, ValueError) as error:  # ValueError: the file could not be written whole
        rank = path.stem.removeprefix("rank-")
        raise ConfigError(
            f"Rank {rank} cannot record its calls in {path}: {error}. BMT_CALL_HISTORY must name a"
            " directory in which every rank can write."
        ) from error


class LoggedCall(NamedTuple):
    """One record. ``compared`` is the part of the call's text that is the same on all ranks;
    ``time`` is in seconds since 1970. ``made_by`` has the ranks that have certainly made the call;
    None if it was not compared.
    """

    call: Call
    compared: str
    time: float
    step: int
    made_by: Sequence[int] | None


class RankCalls:
    """What a rank has shown or recorded: ``data`` is what :meth:`CallLog.to_bytes` returned, or a
    file has.
    """

    def __init__(self, data: bytes) -> None:
        # The last line may be one that is being written.
        lines = [json.loads(line) for line in data[_MAPPED:].rstrip(b"\0").split(b"\n")[:-1]]
        about: dict[str, Any] = lines[0]
        self.run: str = about["run"]
        self.rank, self.world_size, self.process = (
            int(about[name]) for name in ("rank", "world_size", "process")
        )
        self.period: float = about["period"]
        groups = [(line["group"], ranks_of(line["ranks"])) for line in lines[1:]]
        numbers = memoryview(data)[_NUMBERS_AT:_TIMES_AT].cast("Q")
        self.numbers: dict[Group, int] = {
            group: number for group, number in zip(groups, numbers, strict=False) if number
        }
        """That of the last call in each group."""
        self.records = data[_RECORDS_AT:_MAPPED]
        """Those of calls that are the same are the same bytes."""
        # By serial number, without those that were never written, or by halves.
        records = (each for each in _RECORD.iter_unpack(self.records) if each[0] == each[-1] != 0)
        self._sorted = sorted(records)
        self._groups = groups
        self._times = memoryview(data)[_TIMES_AT:_FIRSTS_AT].cast("d")
        self._firsts = memoryview(data)[_FIRSTS_AT:_RECORDS_AT].cast("i")
        *_, slot = _HEAD.unpack_from(data)
        text = data[_HEAD.size + slot * _STATE_BYTES :][:_STATE_BYTES].partition(b"\0")[0]
        self.state = state = RankState.from_json(text)
        """The rank's, after its last call."""
        self._under_way = {*state.under_way, state.waiting.record if state.waiting else 0}
        entered = {name: number for (name, _), number in self.numbers.items()}
        self.state = replace(state, entered=entered)
        if self._sorted:
            last = self._logged(self._sorted[-1])
            when, step = max(state.time, last.time), max(state.training_step, last.step)
            self.state = replace(self.state, last=last.call, time=when, training_step=step)
            if last.call.record > state.record:  # it has gone on since it wrote its state
                self.state = replace(self.state, waiting=None, stack="")

    @classmethod
    def read(cls, path: Path) -> RankCalls:
        """Read the file of a rank that runs or has ended. Raises :class:`ConfigError` if it is
        none.
        """
        data = path.read_bytes()
        magic, version, _ = _HEAD.unpack_from(data.ljust(_HEAD.size, b"\0"))
        if magic != _MAGIC:
            raise ConfigError(f"{path} is not a call history of bmt, or its rank has just begun.")
        if version != _VERSION:
            raise ConfigError(
                f"{path} has version {version} of the call history, and this bmt reads version"
                f" {_VERSION}. Read it with the bmt that the run had."
            )
        try:
            found = cls(data)
            _ = found.calls
        except (LookupError, TypeError, ValueError, struct.error) as error:
            raise ConfigError(
                f"{path} is cut off or damaged ({cause_of(error)}): it has {len(data)} bytes. Copy"
                " it once more."
            ) from error
        return found

    @cached_property
    def calls(self) -> list[LoggedCall]:
        """Its last calls, in order."""
        return [self._logged(record) for record in self._sorted]

    def _logged(self, record: tuple[Any, ...]) -> LoggedCall:
        serial, number, step, length, group, text, _ = record
        name, ranks = self._groups[group]
        shown, _, place = text.rstrip(b"\0").decode(errors="replace").partition("\n")
        call = Call(name, ranks, number, shown, serial, place)
        when, first = self._times[serial % RECORDS], self._firsts[serial % RECORDS]
        made_by = [first] if serial in self._under_way else ranks
        is_compared = number > 0 and first != NOT_COMPARED
        return LoggedCall(call, shown[:length], when, step, made_by if is_compared else None)


def first_difference(of_ranks: Iterable[RankCalls]) -> str:
    """Return the first call of a group that is not the same on two ranks, as a text; empty if there
    is none.
    """
    # Most ranks have made the same calls, which are read once.
    different: dict[tuple[bytes, tuple[Group, ...]], RankCalls] = {}
    for each in of_ranks:
        different.setdefault((each.records, tuple(each.numbers)), each)
    made_calls: dict[Group, dict[int, dict[str, tuple[int, LoggedCall]]]] = defaultdict(
        lambda: defaultdict(dict)
    )
    for each in different.values():
        for logged in each.calls:
            by_number = made_calls[logged.call.group, logged.call.ranks]
            if logged.call.number:
                by_number[logged.call.number].setdefault(logged.compared, (each.rank, logged))
    for (name, ranks), by_number in made_calls.items():
        for number, texts in sorted(by_number.items()):
            if len(texts) > 1:
                two = [
                    f"on rank {rank}, in step {logged.step}, at {clock(logged.time)}:"
                    f" {logged.call.text}{made(logged.call.place)}"
                    for rank, logged in [*texts.values()][:2]
                ]
                members = ", ".join(map(str, ranks))
                return f"call {number} of group {name} (ranks {members}) is {'; '.join(two)}"
    return ""


def clock(seconds: float) -> str:
    """Return a time of today."""
    return time.strftime("%H:%M:%S", time.localtime(seconds))
