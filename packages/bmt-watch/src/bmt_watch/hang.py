"""``bmt hang``: say from the recorded calls of all ranks why a run hung."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from textwrap import shorten
from typing import NamedTuple

import click

from bmt_core.comm.annotate import NOWHERE
from bmt_core.errors import ConfigError
from bmt_watch.call_history import RECORDS, Group, RankHistory, RecordedCall, runs_of
from bmt_watch.call_log import CallLog, GroupLog, first_difference
from bmt_watch.call_watch import SILENT_PERIODS
from bmt_watch.explanation import ADVICE, SILENCE, ended_text, missing_text
from bmt_watch.rank_states import Call, RankState, missing_ranks

_FILES = "rank-*.calls"
_SHOWN_OF_ERROR = 100  # characters
_STACKS = 2  # of so many ranks, where no rank is found to be missing
# Ranks that run are apart at any time, and a large transfer takes a while.
_PERIODS_BEHIND, _PERIODS_UNDER_WAY = 2.0, 10.0


@click.command()
@click.argument("directory", type=click.Path(exists=True, file_okay=False, path_type=Path))
def hang(directory: Path) -> None:
    """Say which rank did not make which call, from what BMT_CALL_HISTORY=DIRECTORY has recorded.

    Reads the files of all ranks of the newest run, whether they still run, have ended or were
    killed. Exit status 1 if something is wrong.
    """
    folder = _newest_run(directory)
    ranks = read_run(folder)
    report = HangReport(ranks)
    first = next(iter(ranks.values()))
    click.echo(
        f"Run {first.run} of {first.world_size} ranks; its last sign of life is of"
        f" {_clock(report.now)}."
    )
    for line in (*report.group_lines(), *report.rank_lines()):
        click.echo(line)
    problems = list(report.problems())
    missing = [rank for rank in range(first.world_size) if rank not in ranks]
    if missing:
        problems.append(
            f"There is no file of {_named(missing)} in {folder}. Copy the files of all hosts into"
            " one directory; a rank without any has not started."
        )
    click.echo()
    click.echo("\n".join(problems) or report.verdict())
    if problems:
        raise SystemExit(1)


def _newest_run(directory: Path) -> Path:
    folders = {path.parent for path in directory.glob(f"*/{_FILES}")}
    if any(directory.glob(_FILES)):
        return directory
    if not folders:
        raise ConfigError(
            f"No rank has recorded calls in {directory}. Set BMT_CALL_HISTORY to it on every host"
            " before the run starts."
        )
    return max(folders, key=lambda folder: folder.name)


def read_run(folder: Path) -> dict[int, RankHistory]:
    """Return the histories in ``folder`` by rank. Raises :class:`ConfigError` for a file that is
    damaged, or of another run.
    """
    ranks: dict[int, RankHistory] = {}
    for path in folder.glob(_FILES):
        history = RankHistory.read(path)
        for other in ranks.values():
            if other.run != history.run:
                raise ConfigError(
                    f"{path} is of run {history.run}, and other files in {folder} are of run"
                    f" {other.run}. Put the files of each run into a directory of its own."
                )
        ranks[history.rank] = history
    return dict(sorted(ranks.items()))


class _Late(NamedTuple):
    """A call that some member of its group has not entered, and the records of those that have."""

    call: Call
    records: Mapping[int, RecordedCall]

    @property
    def waiting(self) -> list[int]:
        """The ranks that wait for its end."""
        return [rank for rank, record in self.records.items() if record.waited]

    @property
    def since(self) -> float:
        """When the first rank came. If all have overwritten the record since, it was long ago."""
        times = (record.waited or record.entered for record in self.records.values())
        return min(times, default=0.0)


class HangReport:
    """What the histories of the ranks of one run show together."""

    def __init__(self, ranks: Mapping[int, RankHistory]) -> None:
        self.now = max(history.last_sign for history in ranks.values())
        """When the last rank gave a sign of life."""
        self._ranks = ranks
        groups = sorted({group for history in ranks.values() for group in history.numbers})
        self._last = {
            group: {rank: ranks[rank].numbers.get(group, 0) for rank in group[1] if rank in ranks}
            for group in groups
        }
        self._records: dict[Group, dict[int, dict[int, RecordedCall]]] = defaultdict(
            lambda: defaultdict(dict)
        )
        for rank, history in ranks.items():
            for record in history.calls:
                self._records[record.group][record.call.number][rank] = record
        world_size = next(iter(ranks.values())).world_size
        self._states = {
            rank: self._state_of(ranks[rank]) if rank in ranks else RankState()
            for rank in range(world_size)
        }
        # If all others have ended, the last one is silent, however soon they have found out.
        is_last = (
            len([history for history in ranks.values() if history.ended]) == len(ranks) - 1 > 0
        )
        self._silent = {
            rank: self.now - history.last_sign
            for rank, history in ranks.items()
            if history.ended is None
            and (is_last or self.now - history.last_sign >= SILENT_PERIODS * history.period)
        }

    def group_lines(self) -> Iterator[str]:
        """Yield for each group which ranks have entered its last call."""
        for group, numbers in self._last.items():
            last = max(numbers.values())
            entered = [rank for rank, number in numbers.items() if number == last]
            behind = [rank for rank, number in numbers.items() if number < last]
            yield f"Group {group[0]} of {_named(group[1])}: " + (
                f"{_named(entered)} entered call {last}, {_named(behind)} did not."
                if behind
                else f"all entered call {last}, the last."
            )

    def rank_lines(self) -> Iterator[str]:
        """Yield where each rank was."""
        for history in self._ranks.values():
            yield f"{_name(history)}: {_position(history)} {_how_it_ended(history)}"

    def problems(self) -> Iterator[str]:
        """Yield what is wrong: calls that differ, calls that some ranks have not entered or that do
        not end, ranks that are silent, and the first error.
        """
        logs = {rank: _log_of(history).to_bytes() for rank, history in self._ranks.items()}
        if difference := first_difference(logs):
            yield f"Ranks have entered different calls: {difference}. {ADVICE}"
        late = [each for group in self._last if (each := self._late_call(group)) is not None]
        late.sort(key=lambda each: (not each.waiting, each.since))
        waits = [(rank, each.call) for each in late for rank in list(each.records)[:1]]
        if ended := ended_text(self._states, waits):
            yield ended
        said = ""
        named: set[int] = set()
        for each in late:
            missing = missing_ranks(each.call, self._states)
            if not named.issuperset(missing):
                named.update(missing)
                said += (text := self._late_text(each))
                yield text
        yield from filter(None, map(self._under_way, self._last))
        for rank, seconds in self._silent.items():
            silence = SILENCE.format(f"rank {rank} on {self._ranks[rank].host}", seconds)
            if f"heard of rank {rank} " not in said:
                yield silence
        failed = [history for history in self._ranks.values() if history.ended]
        if failed:
            first = min(failed, key=lambda history: history.last_sign)
            yield f"The first that ended with an error is rank {first.rank}: {first.ended}"

    def verdict(self) -> str:
        """Return what is to be said where nothing is wrong, or nothing that the files can show."""
        if all(history.ended == "" for history in self._ranks.values()):
            return "Nothing is wrong: all ranks ended without an error."
        stacks = [
            f"{_name(history)}\nIt is here (most recent call last):\n{history.stack}"
            for history in self._ranks.values()
            if history.stack
        ]
        return "\n".join(
            [
                "No rank keeps others waiting in a collective call; sends and receives have no"
                " numbers and are not compared. Ranks that did not end are running, or were killed"
                f" at {_clock(self.now)}.",
                *stacks[:_STACKS],
            ]
        )

    def _state_of(self, history: RankHistory) -> RankState:
        last = history.calls[-1] if history.calls else None
        awaited = _awaited(history)
        return RankState(
            entered={name: number for (name, _), number in history.numbers.items()},
            last=None if last is None else last.call,
            waiting=None if awaited is None else awaited.call,
            stack=history.stack,
            training_step=1 if last is None else last.step,
            seconds=0.0 if last is None else self.now - last.entered,
            ended=history.ended,
            host=history.host,
        )

    def _late_call(self, group: Group) -> _Late | None:
        """Return the first call of ``group`` that not all have entered, if others have waited for
        it for long or it will not come; else None.
        """
        numbers, (name, ranks) = self._last[group], group
        number = min(numbers.values()) + 1
        if number > max(numbers.values()):
            return None
        records = self._records[group].get(number, {})
        text = f"a call that the others entered more than {RECORDS} calls ago"
        unknown = Call(group=name, ranks=ranks, number=number, text=text)
        late = _Late(next((each.call for each in records.values()), unknown), records)
        missing = [rank for rank, last in numbers.items() if last < number]
        is_gone = any(
            self._ranks[each].ended is not None or each in self._silent for each in missing
        )
        periods = 0.0 if is_gone else _PERIODS_BEHIND
        is_late = self.now - late.since >= periods * self._ranks[missing[0]].period
        return late if is_late else None

    def _late_text(self, late: _Late) -> str:
        who, seconds = (
            _named(late.waiting or list(late.records)).capitalize(),
            self.now - late.since,
        )
        if late.waiting:
            verb = "waits" if len(late.waiting) == 1 else "wait"
            text = f"{who} {verb} for {seconds:.1f} s in {late.call}."
        elif late.records:
            text = f"{who} entered {late.call}, {seconds:.1f} s before the last sign of life."
        else:
            text = f"Ranks have not entered {late.call}."
        return f"{text} {missing_text(late.call, self._states, self._silent)}"

    def _under_way(self, group: Group) -> str:
        numbers = self._last[group]
        last = max(numbers.values())
        records = self._records[group].get(last, {})
        waited = [record.waited for record in records.values() if record.waited]
        periods = max(history.period for history in self._ranks.values()) * _PERIODS_UNDER_WAY
        if min(numbers.values()) < last or not waited or self.now - min(waited) < periods:
            return ""
        return (
            f"All of {_named(group[1])} have entered {next(iter(records.values())).call}, and it"
            f" has not ended for {self.now - min(waited):.0f} s: a rank is stopped, or the network"
            " between them has failed."
        )


def _log_of(history: RankHistory) -> CallLog:
    log, groups = CallLog(), dict[Group, GroupLog]()
    for record in history.calls:
        if record.call.number:
            calls = groups.setdefault(record.group, GroupLog(*record.group))
            texts = record.call.text, record.compared
            calls.add(
                (
                    record.call.number,
                    record.call,
                    0,
                    texts,
                    NOWHERE,
                    record.step,
                    record.entered,
                    None,
                )
            )
    log.groups += groups.values()
    return log


def _name(history: RankHistory) -> str:
    return f"Rank {history.rank} on {history.host}, process {history.process}"


def _awaited(history: RankHistory) -> RecordedCall | None:
    return next((record for record in history.calls if record.waited), None)


def _position(history: RankHistory) -> str:
    if not history.calls:
        return "before its first call."
    record = _awaited(history) or history.calls[-1]
    where = f"in {'the backward of ' * record.is_in_backward}step {record.step}"
    if record.waited:
        return f"{where}, and since {_clock(record.waited)} it waits in {record.call}."
    return f"{where}, and its last call, at {_clock(record.entered)}, is {record.call}."


def _how_it_ended(history: RankHistory) -> str:
    if history.ended is None:
        return f"Last sign of life: {_clock(history.last_sign)}."
    error = shorten(history.ended, _SHOWN_OF_ERROR, placeholder=" ...") or "no error"
    return f"The process left the run at {_clock(history.last_sign)}: {error}"


def _named(ranks: Sequence[int]) -> str:
    """Return what messages call several ranks.

    >>> _named([0, 1, 2, 5])
    'ranks 0-2, 5'
    """
    runs = [f"{first}-{last}" if first < last else f"{first}" for first, last in runs_of(ranks)]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(runs)}"


def _clock(seconds: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(seconds))
