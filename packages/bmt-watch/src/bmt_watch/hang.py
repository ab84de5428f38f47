"""``bmt hang``: say from the recorded calls of all ranks why a run hung."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from textwrap import shorten
from typing import NamedTuple

import click

from bmt_core.errors import ConfigError
from bmt_watch.call_log import RECORDS, Group, LoggedCall, RankCalls, clock, first_difference
from bmt_watch.call_watch import SILENT_PERIODS
from bmt_watch.explanation import ADVICE, SILENCE, ended_text, missing_text
from bmt_watch.rank_states import Call, RankState, missing_ranks, runs_of

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
    killed.

    Exit status 1 if something is wrong, 2 if the files cannot be read.
    """
    folder = _newest_run(directory)
    ranks = read_run(folder)
    report = HangReport(ranks)
    first = next(iter(ranks.values()))
    click.echo(
        f"Run {first.run} of {first.world_size} ranks; its last sign of life is of"
        f" {clock(report.now)}."
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


def read_run(folder: Path) -> dict[int, RankCalls]:
    """Return the calls in ``folder`` by rank. Raises :class:`ConfigError` for a file that is
    damaged, or of another run.
    """
    ranks: dict[int, RankCalls] = {}
    for path in folder.glob(_FILES):
        found = RankCalls.read(path)
        for other in ranks.values():
            if other.run != found.run:
                raise ConfigError(
                    f"{path} is of run {found.run}, and other files in {folder} are of run"
                    f" {other.run}. Put the files of each run into a directory of its own."
                )
        ranks[found.rank] = found
    return dict(sorted(ranks.items()))


class _Entered(NamedTuple):
    """A call, the ranks that have entered it, those of them that wait for its end, and since when
    the first of these does, or has entered it; 0 if that is not known any more.
    """

    call: Call
    ranks: Sequence[int]
    waiting: Sequence[int]
    since: float


class HangReport:
    """What the calls of the ranks of one run show together."""

    def __init__(self, ranks: Mapping[int, RankCalls]) -> None:
        self.now = max(each.state.time for each in ranks.values())
        """When the last rank gave a sign of life."""
        self._ranks = ranks
        first = next(iter(ranks.values()))
        self._period = first.period
        groups = sorted({group for each in ranks.values() for group in each.numbers})
        self._last = {
            group: {rank: ranks[rank].numbers.get(group, 0) for rank in group[1] if rank in ranks}
            for group in groups
        }
        self._entered: dict[tuple[Group, int], dict[int, LoggedCall]] = defaultdict(dict)
        self._states = {rank: RankState() for rank in range(first.world_size)}
        for rank, of_rank in ranks.items():
            seconds = self.now - of_rank.calls[-1].time if of_rank.calls else 0.0
            self._states[rank] = replace(of_rank.state, seconds=seconds)
            for each in of_rank.calls:
                group = each.call.group, each.call.ranks
                self._entered[group, each.call.number][rank] = each
        # If all others have ended, the last one is silent, however soon they have found out.
        is_last = sum(bool(self._states[rank].ended) for rank in ranks) == len(ranks) - 1 > 0
        longest = 0.0 if is_last else SILENT_PERIODS * self._period
        silences = {rank: self.now - each.time for rank, each in self._states.items()}
        self._silent = {
            rank: silences[rank]
            for rank in ranks
            if self._states[rank].ended is None and silences[rank] >= longest
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
        for each in self._ranks.values():
            yield f"{_name(each)}: {_position(each)} {_how_it_ended(each.state)}"

    def problems(self) -> Iterator[str]:
        """Yield what is wrong: calls that differ, calls that some ranks have not entered or that do
        not end, ranks that are silent, and the first error.
        """
        if difference := first_difference(self._ranks.values()):
            yield f"Ranks have entered different calls: {difference}. {ADVICE}"
        late = [each for group in self._last if (each := self._late_call(group)) is not None]
        late.sort(key=lambda each: (not each.waiting, each.since))
        waits = [(rank, each.call) for each in late for rank in each.ranks[:1]]
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
            if f"heard of rank {rank} " not in said:
                yield SILENCE.format(f"rank {rank} on {self._states[rank].host}", seconds)
        failed = [each for each in self._ranks.values() if each.state.ended]
        if failed:
            first = min(failed, key=lambda each: each.state.time)
            yield f"The first that ended with an error is rank {first.rank}: {first.state.ended}"

    def verdict(self) -> str:
        """Return what is to be said where nothing is wrong, or nothing that the files can show."""
        if all(each.state.ended == "" for each in self._ranks.values()):
            return "Nothing is wrong: all ranks ended without an error."
        stacks = [
            f"{_name(each)}\nIt is here (most recent call last):\n{each.state.stack}"
            for each in self._ranks.values()
            if each.state.stack
        ]
        return "\n".join(
            [
                "No rank keeps others waiting in a collective call; sends and receives have no"
                " numbers and are not compared. Ranks that did not end are running, or were killed"
                f" at {clock(self.now)}.",
                *stacks[:_STACKS],
            ]
        )

    def _call(self, group: Group, number: int) -> _Entered:
        """Return what is known of call ``number`` of ``group``."""
        found, times = self._entered[group, number], dict[int, float]()
        for rank, each in found.items():
            state = self._states[rank]
            if state.waiting is not None and state.waiting.record == each.call.record:
                times[rank] = state.time - state.waited
        text = f"a call that the others entered more than {RECORDS} calls ago"
        call = next((each.call for each in found.values()), Call(*group, number, text))
        since = min([*times.values(), *(each.time for each in found.values())], default=0.0)
        return _Entered(call, [*found], [*times], since)

    def _late_call(self, group: Group) -> _Entered | None:
        """Return the first call of ``group`` that not all have entered, if others have waited for
        it for long or it will not come; else None.
        """
        numbers = self._last[group]
        number = min(numbers.values()) + 1
        if number > max(numbers.values()):
            return None
        late = self._call(group, number)
        missing = [rank for rank, last in numbers.items() if last < number]
        is_gone = any(
            self._states[each].ended is not None or each in self._silent for each in missing
        )
        periods = 0.0 if is_gone else _PERIODS_BEHIND
        return late if self.now - late.since >= periods * self._period else None

    def _late_text(self, late: _Entered) -> str:
        who = _named(late.waiting or late.ranks).capitalize()
        seconds, verb = self.now - late.since, "waits" if len(late.waiting) == 1 else "wait"
        text = f"Ranks have not entered {late.call}."
        if late.waiting:
            text = f"{who} {verb} for {seconds:.1f} s in {late.call}."
        elif late.ranks:
            text = f"{who} entered {late.call}, {seconds:.1f} s before the last sign of life."
        return f"{text} {missing_text(late.call, self._states, self._silent)}"

    def _under_way(self, group: Group) -> str:
        numbers = self._last[group]
        last = max(numbers.values())
        call, _, waiting, since = self._call(group, last)
        seconds = self.now - since if waiting else 0.0
        if min(numbers.values()) < last or seconds < self._period * _PERIODS_UNDER_WAY:
            return ""
        return (
            f"All of {_named(group[1])} have entered {call}, and it has not ended for"
            f" {seconds:.0f} s: a rank is stopped, or the network between them has failed."
        )


def _name(of_rank: RankCalls) -> str:
    return f"Rank {of_rank.rank} on {of_rank.state.host}, process {of_rank.process}"


def _position(of_rank: RankCalls) -> str:
    state = of_rank.state
    if not of_rank.calls:
        return "before its first call."
    where = f"in step {state.training_step}"
    if state.waiting is not None:
        since = clock(state.time - state.waited)
        return f"{where}, and since {since} it waits in {state.waiting}."
    return f"{where}, and its last call, at {clock(of_rank.calls[-1].time)}, is {state.last}."


def _how_it_ended(state: RankState) -> str:
    if state.ended is None:
        return f"Last sign of life: {clock(state.time)}."
    error = shorten(state.ended, _SHOWN_OF_ERROR, placeholder=" ...") or "no error"
    return f"The process left the run at {clock(state.time)}: {error}"


def _named(ranks: Sequence[int]) -> str:
    """Return what messages call several ranks.

    >>> _named([0, 1, 2, 5])
    'ranks 0-2, 5'
    """
    runs = [f"{first}-{last}" if first < last else f"{first}" for first, last in runs_of(ranks)]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(runs)}"
