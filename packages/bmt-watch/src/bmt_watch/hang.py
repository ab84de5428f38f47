"""``bmt hang``: say from the recorded calls of all ranks why a run hung."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten

import click

from bmt_core.errors import ConfigError
from bmt_watch.call_history import RECORDS, Group, RankHistory, RecordedCall, runs_of
from bmt_watch.call_watch import SILENT_PERIODS
from bmt_watch.stuck_calls import ADVICE, SILENCE

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


class HangReport:
    """What the histories of the ranks of one run show together."""

    def __init__(self, ranks: Mapping[int, RankHistory]) -> None:
        self.now = max(history.last_sign for history in ranks.values())
        """When the last rank gave a sign of life."""
        self._ranks = ranks
        self._groups = sorted({group for history in ranks.values() for group in history.numbers})
        self._last = {
            group: {rank: ranks[rank].numbers.get(group, 0) for rank in group[1] if rank in ranks}
            for group in self._groups
        }
        self._records: dict[Group, dict[int, dict[int, RecordedCall]]] = {
            group: defaultdict(dict) for group in self._groups
        }
        for rank, history in ranks.items():
            for record in history.calls:
                if record.call.number:
                    self._records[record.group][record.call.number][rank] = record

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
        """Yield what is wrong: calls that differ, ranks that are missing in a call, calls that do
        not end, ranks that are silent, and the first error.
        """
        yield from filter(None, map(self._mismatch, self._groups))
        missing = {rank: call for rank in self._ranks if (call := self._missed_call(rank))}
        # Who waits in a call itself may be late for that reason, and comes last.
        for rank in sorted(missing, key=lambda rank: _awaited(self._ranks[rank]) is not None):
            yield self._missing_text(rank, missing[rank])
        yield from filter(None, map(self._under_way, self._groups))
        for rank, history in self._ranks.items():
            if rank not in missing and (silence := self._silence(history)):
                yield silence
        failed = [history for history in self._ranks.values() if history.ended]
        if failed:
            first = min(failed, key=lambda history: history.last_sign)
            yield f"The first that ended with an error is rank {first.rank}: {first.ended}"

    def verdict(self) -> str:
        """Return what is to be said where nothing is wrong, or nothing that the files can show."""
        if all(history.ended == "" for history in self._ranks.values()):
            return "Nothing is wrong: all ranks ended without an error."
        stacks = [_name(history) + _stack(history) for history in self._ranks.values()]
        return "\n".join(
            [
                "No rank keeps others waiting in a collective call; sends and receives have no"
                " numbers and are not compared. Ranks that did not end are running, or were killed"
                f" at {_clock(self.now)}.",
                *[stack for stack in stacks if "\n" in stack][:_STACKS],
            ]
        )

    def _mismatch(self, group: Group) -> str:
        for number, records in sorted(self._records[group].items()):
            texts: dict[str, list[int]] = defaultdict(list)
            for rank, record in records.items():
                texts[record.compared].append(rank)
            if len(texts) > 1:
                made = "; ".join(f"on {_named(ranks)}: {text}" for text, ranks in texts.items())
                return (
                    f"Ranks entered different calls. Call {number} of group {group[0]} is {made}."
                    f" {ADVICE}"
                )
        return ""

    def _missed_call(self, rank: int) -> _Missed | None:
        """Return the call that has waited longest for ``rank``, if others have waited for it for
        long or it will not come; else None.
        """
        history = self._ranks[rank]
        is_gone = history.ended is not None or self._silence(history) != ""
        late_after = 0.0 if is_gone else _PERIODS_BEHIND * history.period
        missed = [
            _Missed(self._records[group].get(numbers[rank] + 1, {}), group, numbers[rank] + 1)
            for group, numbers in self._last.items()
            if numbers.get(rank, 0) < max(numbers.values()) and rank in numbers
        ]
        late = [call for call in missed if self.now - call.since >= late_after]
        return min(late, key=lambda call: (not call.waiting, call.since), default=None)

    def _missing_text(self, rank: int, call: _Missed) -> str:
        history, seconds = self._ranks[rank], self.now - call.since
        entered = [other for other, last in self._last[call.group].items() if last >= call.number]
        others = f"which {_named(entered)} entered more than {RECORDS} calls ago"
        if call.waiting:
            verb = "waits" if len(call.waiting) == 1 else "wait"
            others = f"in which {_named(call.waiting)} {verb} for {seconds:.1f} s"
        elif call.records:
            others = f"which {_named(entered)} entered {seconds:.1f} s before the last sign of life"
        ending = self._silence(history) or _how_it_ended(history)
        return (
            f"{_name(history)}, did not enter {call.shown}, {others}. It is {_position(history)}"
            f" {ending}{_stack(history)}"
        )

    def _under_way(self, group: Group) -> str:
        numbers = self._last[group]
        last = max(numbers.values())
        records = self._records[group].get(last, {})
        waited = [record.waited for record in records.values() if record.waited]
        periods = max(history.period for history in self._ranks.values()) * _PERIODS_UNDER_WAY
        if min(numbers.values()) < last or not waited or self.now - min(waited) < periods:
            return ""
        return (
            f"All of {_named(group[1])} have entered {_shown(next(iter(records.values())))}, and it"
            f" has not ended for {self.now - min(waited):.0f} s: a rank is stopped, or the network"
            " between them has failed."
        )

    def _silence(self, history: RankHistory) -> str:
        seconds = self.now - history.last_sign
        if history.ended is not None or seconds < SILENT_PERIODS * history.period:
            return ""
        return SILENCE.format(f"rank {history.rank} on {history.host}", seconds)


@dataclass(frozen=True)
class _Missed:
    """A call that a rank has not entered, and the records of those that have."""

    records: Mapping[int, RecordedCall]
    group: Group
    number: int

    @property
    def since(self) -> float:
        """When the first rank came. If all have overwritten the record since, it was long ago."""
        times = (record.waited or record.entered for record in self.records.values())
        return min(times, default=0.0)

    @property
    def waiting(self) -> list[int]:
        return [rank for rank, record in self.records.items() if record.waited]

    @property
    def shown(self) -> str:
        records = list(self.records.values())
        return _shown(records[0]) if records else f"call {self.number} of group {self.group[0]}"


def _name(history: RankHistory) -> str:
    return f"Rank {history.rank} on {history.host}, process {history.process}"


def _stack(history: RankHistory) -> str:
    return f"\nIt is here (most recent call last):\n{history.stack}" if history.stack else ""


def _awaited(history: RankHistory) -> RecordedCall | None:
    return next((record for record in history.calls if record.waited), None)


def _position(history: RankHistory) -> str:
    if not history.calls:
        return "before its first call."
    record = _awaited(history) or history.calls[-1]
    where = f"in {'the backward of ' * record.is_in_backward}step {record.step}"
    if record.waited:
        return f"{where}, and since {_clock(record.waited)} it waits in {_shown(record)}."
    return f"{where}, and its last call, at {_clock(record.entered)}, is {_shown(record)}."


def _how_it_ended(history: RankHistory) -> str:
    if history.ended is None:
        return f"Last sign of life: {_clock(history.last_sign)}."
    error = shorten(history.ended, _SHOWN_OF_ERROR, placeholder=" ...") or "no error"
    return f"The process left the run at {_clock(history.last_sign)}: {error}"


def _shown(record: RecordedCall) -> str:
    if record.call.number == 0:
        return f"{record.call.text} (group {record.call.group})"
    return f"call {record.call.number} of group {record.call.group} ({record.call.text})"


def _named(ranks: Sequence[int]) -> str:
    """Return what messages call several ranks.

    >>> _named([0, 1, 2, 5])
    'ranks 0-2, 5'
    """
    runs = [f"{first}-{last}" if first < last else f"{first}" for first, last in runs_of(ranks)]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(runs)}"


def _clock(seconds: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(seconds))
