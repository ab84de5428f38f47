"""The file of a call history: records that are overwritten or torn, and files that are none."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

import bmt_core
from bmt_core.comm.annotate import annotate
from bmt_core.errors import ConfigError
from bmt_core.run import runtime
from bmt_testing import rank_pool
from bmt_watch import call_check, call_log
from bmt_watch.call_log import RECORDS, UNKNOWN, CallLog, RankCalls, Text
from bmt_watch.observer import CallObserver
from bmt_watch.rank_states import Call, RankState
from bmtrain._program import main

GROUP = "dp/main/0", (0, 1)


def log_in(directory: Path, *, rank: int = 0, run: str = "run") -> CallLog:
    return CallLog(directory, run, rank=rank, world_size=2, period=1.0)


def file_of(directory: Path, *, rank: int = 0, run: str = "run") -> Path:
    return directory / run / f"rank-{rank}.calls"


def enter(log: CallLog, group: int, number: int, shown: str, compared: str = "") -> int:
    return log.add(group, number, Text.of(shown, compared or shown, "in layer ü"), UNKNOWN)


def give_sign(log: CallLog, waits_since: float | None = None, **values: Any) -> None:
    """Write a state; the rank waits in its last call since then, or not at all."""
    state = RankState(time=time.time(), record=log.serial, host="node", **values)
    if waits_since is not None:
        last = RankCalls(log.to_bytes()).calls[-1].call
        state = replace(state, waiting=last, waited=state.time - waits_since)
    log.write_state(state)


def close(log: CallLog, ended: str) -> None:
    give_sign(log, ended=ended)
    log.close()


def make_calls(log: CallLog, texts: Sequence[str]) -> None:
    """Make the calls of one group, and wait for the last."""
    group = log.add_group(*GROUP)
    for number, text in enumerate(texts, 1):
        enter(log, group, number, text)
    give_sign(log, time.time())


def hang(directory: Path) -> Result:
    return CliRunner().invoke(main, ["hang", str(directory)])


def test_the_last_calls_are_kept_and_the_numbers_of_groups_for_ever(tmp_path: Path) -> None:
    log = log_in(tmp_path)
    early, late = log.add_group("early", (0, 1)), log.add_group("late", (0, 1, 5))
    for number in range(1, 4):
        enter(log, early, number, "all_reduce")
    for number in range(1, RECORDS + 11):
        enter(log, late, number, "all_gather, for layers.1", "all_gather")
    give_sign(log, 1.0)
    for read in (RankCalls.read(file_of(tmp_path)), RankCalls(log.to_bytes())):
        assert read.numbers == {("early", (0, 1)): 3, ("late", (0, 1, 5)): RECORDS + 10}
        assert read.state.entered == {"early": 3, "late": RECORDS + 10} == log.entered()
        assert [each.call.number for each in read.calls] == list(range(11, RECORDS + 11))
        assert [each.call.record for each in read.calls] == list(range(14, RECORDS + 14))
        assert read.state.waiting == read.calls[-1].call == read.state.last
        assert read.state.time - read.state.waited == pytest.approx(1.0)
        assert read.calls[0].compared == "all_gather"
        assert read.calls[0].call.text.endswith("layers.1")
        assert (read.run, read.rank, read.process) == ("run", 0, os.getpid())
        assert read.state.ended is None


def test_a_text_that_is_too_long_is_cut_and_one_of_any_letters_is_read(tmp_path: Path) -> None:
    make_calls(log_in(tmp_path), ["ä" * 70_000, "all_reduce, für ü", ""])
    calls = [each.call for each in RankCalls.read(file_of(tmp_path)).calls]
    assert [call.text for call in calls] == ["ä" * 152, "all_reduce, für ü", ""]
    assert [call.place for call in calls] == ["", "in layer ü", "in layer ü"]


def test_a_record_that_was_written_by_halves_is_left_out(tmp_path: Path) -> None:
    make_calls(log_in(tmp_path), ["one", "two", "three"])
    path, size = file_of(tmp_path), call_log._RECORD.size
    data = bytearray(path.read_bytes())
    at = call_log._RECORDS_AT + 3 * size
    data[at : at + 8] = (3 + RECORDS).to_bytes(8, "little")  # only the begin of the next is there
    path.write_bytes(data)
    assert [each.call.text for each in RankCalls.read(path).calls] == ["one", "two"]


def test_waiting_steps_stacks_and_ends_are_read(tmp_path: Path) -> None:
    log = log_in(tmp_path)
    group, before = log.add_group(*GROUP), time.time()
    first, second = object(), object()
    for optimizer in (first, second):
        log.end_of_step(optimizer)
    enter(log, group, 1, "all_reduce")
    give_sign(log, before, stack="File train.py, line 3")
    read = RankCalls.read(file_of(tmp_path))
    assert read.state.waiting == read.calls[0].call and read.calls[0].step == 2
    assert read.state.stack == "File train.py, line 3" and before <= read.state.time <= time.time()
    enter(log, group, 2, "all_reduce")  # so it does not wait any more
    state = RankCalls.read(file_of(tmp_path)).state
    assert state.waiting is None and state.stack == "" and state.training_step == 2
    close(log, "ValueError: no luck")
    assert RankCalls.read(file_of(tmp_path)).state.ended == "ValueError: no luck"


def test_a_state_that_is_too_long_is_cut_to_what_fits() -> None:
    log = CallLog()
    group = log.add_group("a", ranks := tuple(range(0, 90_000, 3)))
    call = Call("a", ranks, 1, "all_reduce", enter(log, group, 1, "all_reduce"))
    give_sign(log, last=call, waiting=call, step=7)
    state = RankCalls(log.to_bytes()).state
    assert state.step == 7 and state.last == call
    assert state.waiting is not None and state.waiting.record == call.record


def damaged(kind: str, data: bytes) -> bytes:
    head, lines = data[: call_log._MAPPED], data[call_log._MAPPED :]
    return {
        "no history": b"#!/bin/sh\n",
        "empty": b"",
        "another version": data[:8] + (7).to_bytes(4, "little") + data[12:],
        "cut off": data[:5000],
        "without lines": head,
        "wrong lines": head + lines.replace(b"{", b"["),
        "without its groups": head + b"".join(lines.splitlines(keepends=True)[:1]),
    }[kind]


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("no history", "is not a call history of bmt"),
        ("empty", "is not a call history of bmt"),
        ("another version", "has version 7 of the call history, and this bmt reads version 2"),
        ("cut off", "is cut off or damaged"),
        ("without lines", "is cut off or damaged"),
        ("wrong lines", "is cut off or damaged"),
        ("without its groups", "is cut off or damaged"),
    ],
)
def test_a_file_that_is_none_is_named_in_one_error(kind: str, said: str, tmp_path: Path) -> None:
    for rank in range(2):
        make_calls(log_in(tmp_path, rank=rank), ["one", "two"])
    path = file_of(tmp_path, rank=1)
    path.write_bytes(damaged(kind, path.read_bytes()))
    result = hang(tmp_path)
    assert result.exit_code == 2 and result.output.startswith(f"Error: {path} {said}")
    assert result.output.count("\n") == 1


def test_files_of_two_runs_in_one_directory_are_refused(tmp_path: Path) -> None:
    make_calls(log_in(tmp_path), ["one"])
    make_calls(log_in(tmp_path, rank=1, run="newer"), ["one"])
    file_of(tmp_path).rename(tmp_path / "newer" / "rank-0.calls")
    result = hang(tmp_path / "newer")
    assert result.exit_code == 2
    assert "is of run run" in result.output or "is of run newer" in result.output


def test_the_newest_run_is_read_and_a_rank_without_a_file_is_named(tmp_path: Path) -> None:
    for rank in range(2):
        make_calls(log_in(tmp_path, rank=rank, run="20260101"), ["one"])
    log = log_in(tmp_path, run="20260102")
    make_calls(log, ["one"])
    close(log, "")
    result = hang(tmp_path)
    assert result.exit_code == 1 and result.output.startswith("Run 20260102 of 2 ranks")
    assert f"There is no file of rank 1 in {tmp_path}/20260102." in result.output
    empty = hang(file_of(tmp_path, run="20260101").parent.parent / "20260101")
    assert empty.output.startswith("Run 20260101 of 2 ranks")


def test_a_directory_without_files_is_an_error_that_names_the_variable(tmp_path: Path) -> None:
    result = hang(tmp_path)
    assert result.exit_code == 2 and "BMT_CALL_HISTORY" in result.output


def test_a_history_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    with pytest.raises(ConfigError, match=r"Rank 0 cannot record its calls in .*BMT_CALL_HISTORY"):
        log_in(tmp_path)


def test_a_rank_that_comes_late_is_named_when_others_have_waited_for_long(tmp_path: Path) -> None:
    first, second = (log_in(tmp_path, rank=rank) for rank in range(2))
    make_calls(first, ["one", "two", "three"])
    make_calls(second, ["one", "two"])
    give_sign(second, stack="File train.py, line 3\n  evaluate()")
    result = hang(tmp_path)  # ranks are apart at any time
    assert result.exit_code == 0 and "\nNo rank keeps others waiting in a coll" in result.output
    assert "It is here (most recent call last):\nFile train.py, line 3\n" in result.output
    give_sign(first, time.time() - 31.0)
    result = hang(tmp_path)
    found = result.output.partition("\n\n")[2]
    assert result.exit_code == 1 and found.startswith("Rank 0 waits for 31.")
    assert (
        " s in call 3 of group dp/main/0 (ranks 0, 1): three, made in layer ü. It waits for rank 1,"
        " whose last call was call 2 of"
    ) in found
    assert "(most recent call last):\nFile train.py, line 3\n  evaluate()\n" in found


def test_a_rank_that_has_said_nothing_is_silent_once_all_others_have_ended(tmp_path: Path) -> None:
    first, second = (log_in(tmp_path, rank=rank) for rank in range(2))
    make_calls(first, ["one", "two"])
    make_calls(second, ["one"])
    assert "Nothing was heard" not in hang(tmp_path).output
    close(first, "CallError: a connection is lost")
    assert "Nothing was heard of rank 1 for 0" in hang(tmp_path).output


def test_a_call_that_all_have_entered_and_that_does_not_end_is_named(tmp_path: Path) -> None:
    logs = [log_in(tmp_path, rank=rank) for rank in range(2)]
    for log in logs:
        make_calls(log, ["one", "two"])
    assert hang(tmp_path).exit_code == 0
    for log in logs:
        give_sign(log, time.time() - 40.5)
    found = hang(tmp_path).output.partition("\n\n")[2]
    call = "call 2 of group dp/main/0 (ranks 0, 1): two, made in layer ü"
    assert found.startswith(f"All of ranks 0-1 have entered {call}, and it has not ended for 4")
    assert found.count("\n") == 1


def make_unchecked_calls(directory: Path) -> None:
    """Calls as a backend for devices announces them, without the operations, and transfers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BMT_CALL_HISTORY", str(directory))
        patch.setattr(call_check, "FIRST_CALLS", 2)
        runtime.init_distributed(device="cpu")
        run = bmt_core.current()
        assert isinstance(run.observer, CallObserver)
        group = run.observer.group("devices", (0, 1))
        for number in range(1, 5):
            with annotate(f"for layer {run.rank}", is_compared=False):
                group.enter_on_device(("all_reduce", torch.float32), torch.ones(number))
        tensor = torch.ones(3)
        if run.rank == 0:
            run.world.send(tensor, 1).wait()
        else:
            run.world.recv(tensor, 0).wait()
        runtime.shutdown()


def test_calls_on_devices_that_nobody_compares_and_transfers_are_recorded(tmp_path: Path) -> None:
    rank_pool(2).run(make_unchecked_calls, tmp_path, init=None)
    for rank, transfer in enumerate(("a send to rank 1", "a receive from rank 0")):
        (path,) = tmp_path.glob(f"*/rank-{rank}.calls")
        calls = RankCalls.read(path).calls
        found = [each for each in calls if each.call.group == "devices"]
        assert [each.call.number for each in found] == [1, 2, 3, 4]
        assert [each.compared for each in found] == [
            f"all_reduce torch.float32, {4 * number} bytes" for number in range(1, 5)
        ]
        assert {each.call.text.partition("bytes")[2] for each in found} == {f", for layer {rank}"}
        assert [each.made_by is None for each in found] == [False, False, True, True]
        assert (calls[-1].call.text, calls[-1].call.number) == (transfer, 0)
    assert hang(tmp_path).exit_code == 0


def warned_of(directory: Path) -> list[str]:
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        patch.setenv("BMT_CALL_HISTORY", str(directory))
        runtime.init_distributed(device="cpu", check_calls=False)
        runtime.shutdown()
    return [str(warning.message) for warning in found]


def test_a_run_that_records_nothing_says_so_once(tmp_path: Path) -> None:
    said, others = rank_pool(2).run(warned_of, tmp_path, init=None)
    assert len(said) == 1 and said[0].startswith("BMT_CALL_HISTORY is set, and nothing is recorded")
    assert others == [] and list(tmp_path.iterdir()) == []
