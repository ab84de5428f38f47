"""A rank alone in a collective, or in another one than the rest, is an error on every rank, which
says who is where.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from watch_parts import observer, quick_watch

import bmt_core
import bmt_params
from bmt_core.comm import all_gather_object
from bmt_core.comm.annotate import annotate
from bmt_core.comm.collective_section import collective_section
from bmt_core.errors import CallError
from bmt_core.run import collectives as distributed
from bmt_core.run import runtime
from bmt_testing import rank_pool
from bmt_watch import call_check, call_watch
from bmt_watch.observer import CallObserver


@contextlib.contextmanager
def standard_error() -> Iterator[list[str]]:
    """What this process and its libraries write to standard error, when the block has ended."""
    lines: list[str] = []
    kept = os.dup(2)
    with tempfile.TemporaryFile("w+") as file:
        os.dup2(file.fileno(), 2)
        try:
            yield lines
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            file.seek(0)
            lines += file


class Layer(bmt_params.DistributedModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight = bmt_params.DistributedParameter(torch.ones(3, 4))


def different_sizes() -> None:
    part = torch.ones(10 + bmt_core.rank())
    bmt_core.current().world.all_gather(torch.ones(2 * part.numel()), part).wait()


def different_names() -> None:
    with annotate(f"for layer {bmt_core.rank()}"):
        distributed.all_reduce(torch.ones(3))


def a_weight_printed_on_one_rank() -> None:
    layer = Layer()
    if bmt_core.rank() == 0:
        str(layer.weight)
    distributed.all_reduce(torch.ones(3))


def different_groups() -> None:
    run = bmt_core.current()
    if bmt_core.rank() == 0:
        all_gather_object("alone", run.world)
    else:
        run.lanes.gather.group(run.world).all_reduce(torch.ones(3)).wait()


def a_rank_that_has_ended() -> None:
    if bmt_core.rank() == 0:
        try:
            raise ValueError("no luck")
        finally:
            bmt_core.shutdown()
    distributed.all_reduce(torch.ones(3))


def a_caught_error_that_another_call_follows() -> None:
    with contextlib.suppress(CallError):
        different_sizes()
    distributed.all_reduce(torch.ones(3))


def a_killed_rank() -> None:
    if bmt_core.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    distributed.all_reduce(torch.ones(3))


def failure_of(case: Callable[[], None]) -> str:
    """Return what ``case`` raises."""
    runtime.init_distributed(device="cpu", timeout=300)
    try:
        case()
    except (CallError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        runtime.shutdown()
    return ""


def read_slowly(store: torch.distributed.Store) -> None:
    store.wait(["warned"])


def all_reduce_ones() -> None:
    assert distributed.all_reduce(torch.ones(3)).tolist() == [2.0] * 3


def meet_before_a_call_on_devices() -> None:
    group = observer().group("late", (0, 1))
    group.enter_on_device(("all_reduce",), torch.ones(1))


def warned_of_a_late_rank(call: Callable[[], None]) -> str:
    """Rank 1 makes the ``call`` when rank 0 has warned that it waits for it."""
    runtime.init_distributed(device="cpu", timeout=300)
    said: list[str] = []
    run = bmt_core.current()
    store = observer().store.clone()

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())
            store.set("warned", "")

    handler = Handler()
    call_watch.logger.addHandler(handler)
    if run.rank == 1:
        read_slowly(store)
    call()
    call_watch.logger.removeHandler(handler)
    runtime.shutdown()
    return " ".join(said)


def different_calls_on_devices() -> None:
    """What a backend for devices does; the operation itself is left out."""
    group = observer().group("devices", (0, 1))
    for number in range(call_check.FIRST_CALLS + 1):
        group.enter_on_device(("all_reduce", number), torch.ones(1))
    group = observer().group("others", (0, 1))
    for number in range(call_check.FIRST_CALLS + bmt_core.rank()):  # one more is not checked
        group.enter_on_device(("all_reduce", number), torch.ones(1))
    group = observer().group("last", (0, 1))
    group.enter_on_device(("all_reduce", bmt_core.rank()), torch.ones(1))


CASES = [
    different_calls_on_devices,
    different_sizes,
    different_names,
    a_weight_printed_on_one_rank,
    different_groups,
    a_rank_that_has_ended,
    a_caught_error_that_another_call_follows,
]


def all_cases() -> tuple[list[str], list[dict[str, str]], str]:
    with quick_watch():
        failures = {case.__name__: failure_of(case) for case in CASES}
        warning = warned_of_a_late_rank(all_reduce_ones)
        with standard_error() as noise:
            warned_of_a_late_rank(meet_before_a_call_on_devices)
        failures["what torch prints"] = "".join(noise)
        runtime.init_distributed(device="cpu")
        told = all_gather_object((warning, failures), bmt_core.current().world)
        runtime.shutdown()
        return [said for said, _ in told], [found for _, found in told], failure_of(a_killed_rank)


@pytest.mark.slow("bmt-watch", "bmt-core")
@pytest.mark.ranks(2)
def test_every_rank_raises_and_says_who_is_where() -> None:
    survivor, killed = rank_pool(2).outcomes(all_cases, init=None, timeout=600)
    assert killed.error_type == "Died"
    warnings, failures, of_killed = survivor.value
    assert [said.pop("what torch prints") for said in failures] == ["", ""]
    for rank, said in enumerate(failures):
        one, other = "all_gather torch.float32, 40 bytes", "all_gather torch.float32, 44 bytes"
        for name in ("different_sizes", "a_caught_error_that_another_call_follows"):
            assert said[name].startswith("CallError: Ranks have entered different calls: rank ")
            assert (
                one in said[name]
                and other in said[name]
                and "call 1 of group dp/main/0 (ranks 0, 1)" in said[name]
            )
        assert "for layer 0" in said["different_names"] and "for layer 1" in said["different_names"]
        printed = said["a_weight_printed_on_one_rank"]
        assert (
            "all_gather torch.float32, 24 bytes, for Layer.weight of shape (3, 4)" in printed
            and "all_reduce sum" in printed
        )
        on_devices = said["different_calls_on_devices"]
        assert (
            "call 1 of group last" in on_devices
            and "all_reduce 0" in on_devices
            and "all_reduce 1" in on_devices
        )
        in_ring = said["different_groups"]
        assert (
            "rank 0 is in call 1 of group dp/main/0 (ranks 0, 1): all_gather torch.uint8, 512"
            " bytes, which rank 1 has not"
        ) in in_ring
        assert (
            "rank 1 is in call 1 of group dp/gather/0 (ranks 0, 1): the first operation on the"
            " group, which"
        ) in in_ring
        ended = said["a_rank_that_has_ended"]
        assert ended.startswith(("ValueError: no luck", "CallError: Rank 0 has ")[rank])
        assert "ValueError: no luck" in ended
    assert warnings[1] == ""
    assert (
        "rank 0 has waited 0 s in call 1 of group dp/main/0 (ranks 0, 1): all_reduce sum"
        in warnings[0]
    )
    assert (
        "It waits for rank 1, which has entered no call yet.\nRank 1 is now here (most recent"
        " call last):\n"
    ) in warnings[0]
    line = 'store.wait(["warned"])'
    assert re.search(
        rf'File ".*test_call_check.py", line \d+, in read_slowly\n +{re.escape(line)}$', warnings[0]
    )
    assert (
        "CallError: The process of rank 1, which has entered no call before call 1 of group"
        in of_killed
    )


def more_calls_than_are_kept() -> float:
    """The root of a broadcast runs ahead by more calls than the store keeps."""
    group, total = bmt_core.current().world, 0.0
    for number in range(40):
        tensor = torch.full((2,), float(number))
        group.broadcast(tensor, 0).wait()
        total += float(tensor[0])
        if number % 16 == 15:
            group.all_reduce(tensor).wait()
    return total


def with_four_slots() -> float:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(call_check, "_SLOTS", 4)
        runtime.init_distributed(device="cpu")
        return more_calls_than_are_kept()


def unchecked() -> bool:
    return not isinstance(bmt_core.current().observer, CallObserver)


def test_a_rank_may_be_ahead_by_more_calls_than_are_kept_and_the_check_can_be_off() -> None:
    assert rank_pool(2).run(with_four_slots, init=None) == [sum(range(40))] * 2
    assert rank_pool(2).run(unchecked, init={"check_calls": False}) == [True, True]


def section_that_rank_1_does_not_enter() -> None:
    group = bmt_core.current().world
    if group.rank == 1:
        raise ValueError("planted")
    with collective_section(group, "saving"):
        group.all_reduce(torch.ones(1)).wait()


def test_a_section_whose_call_fails_makes_no_other_call() -> None:
    outcome, _ = rank_pool(2).outcomes(section_that_rank_1_does_not_enter)
    assert outcome.traceback.count("Rank 1 has failed (ValueError: planted)") == 1, outcome
    assert "all_reduce" in outcome.error_message


def meets(init_method: str, check_calls: bool | None) -> bool:
    """Whether a run that meets by ``init_method`` compares calls."""
    runtime.init_distributed(init_method, device="cpu", check_calls=check_calls)
    try:
        return isinstance(runtime.current().observer, CallObserver)
    finally:
        runtime.shutdown()


def test_a_file_in_which_ranks_meet_is_not_lengthened_by_every_call_unless_asked(
    tmp_path: Path,
) -> None:
    for check_calls, is_compared in ((None, False), (True, True)):
        init_method = f"file://{tmp_path}/store-{check_calls}"
        assert rank_pool(2).run(meets, init_method, check_calls, init=None) == [is_compared] * 2
    assert rank_pool(2).run(meets, "env://", None, init=None) == [True] * 2
