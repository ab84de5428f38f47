"""Gathers by copies between GPUs of one host: every level trains as plain torch does, delays change
nothing, nothing stays mapped, and a rank that does not come ends the others.
"""

from __future__ import annotations

import logging
import time
from functools import cache, partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from delays import PLACES, Where, delayed
from lane_trainings import Case, Sharded, Values, compare, plain, train
from torch import nn

import bmtrain as bmt
from bmt_core.errors import CallError
from bmt_core.peers import PeerMemory
from bmt_core.run.runtime import current
from bmt_testing import run_ranks
from bmt_zero import Block
from bmt_zero.peer_gathers import _AllPeerGathers, gather_of

pytestmark = pytest.mark.gpu(2)
INIT = {"device": "cuda"}
ALWAYS, NEVER = {"BMT_COPIED_GATHERS": "0"}, {"BMT_COPIED_GATHERS": "never"}
on_four = pytest.param(4, marks=pytest.mark.gpu(4))


@cache
def expected() -> Values:
    (values,) = run_ranks(plain, 1, init=INIT)
    return values


def gathered() -> int:
    """How many gathers this rank has made by copies."""
    return current().state(_AllPeerGathers).number


def trainings(level: int, where: Where | None) -> tuple[list[Values], int]:
    found = []
    for recomputes, optimizer in ((False, "torch"), (True, "adam"), (True, "offload")):
        case = Case(level, recomputes, recomputes, optimizer, splits=False, postponed=False)
        if where is None:
            found.append(train(Sharded(case), case))
            continue
        with delayed(where) as watch:
            model = Sharded(case)
            watch(model)
            found.append(train(model, case))
    return found, gathered()


@pytest.mark.parametrize("size", [2, on_four])
@pytest.mark.parametrize("level", [1, 2, 3])
def test_training_equals_plain_torch(level: int, size: int) -> None:
    for env, uses_copies in ((ALWAYS, True), (NEVER, False), ({}, False)):  # by default, large ones
        ranks = run_ranks(trainings, size, level, None, init=INIT, env=env, timeout=240)
        for each in zip(*(values for values, _ in ranks), strict=True):
            compare(expected(), list(each), (level, env))
        assert [number > 0 for _, number in ranks] == [uses_copies] * size


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("level", [1, 2, 3])
def test_delays_change_nothing(level: int, where: Where) -> None:
    ranks = run_ranks(trainings, 2, level, where, init=INIT, env=ALWAYS, timeout=240)
    for each in zip(*(values for values, _ in ranks), strict=True):
        compare(expected(), list(each), (level, where))


class LateLink:
    """The link of a rank that, in turn with the others, comes to a gather and copies later."""

    def __init__(self, link: Any) -> None:
        self._link = link

    def __getattr__(self, name: str) -> Any:
        return getattr(self._link, name)

    def gather(self, *arguments: Any) -> None:
        _, _, _, written, _, rank, value, stream = arguments
        if value % len(written) == rank:
            self._link.write(written[rank], value, stream, stream)
            torch.cuda._sleep(3_000_000)
        self._link.gather(*arguments)


def wrong_gathers(without: str) -> int:
    """How many of a hundred gathers are wrong, before which one rank is late to write its shard,
    and after which all write to theirs at once; some, ``without`` waiting for one kind of counter.
    """
    run, length, size = current(), 64 << 20, bmt.world_size()
    shard = torch.zeros(length, dtype=torch.uint8, device="cuda")
    output = shard.new_empty(size * length)
    gather, lane = gather_of(shard, run.world), run.lanes.gather
    gathers = run.state(_AllPeerGathers).between(run.world)
    assert gathers is not None
    gathers.memory = gathers.memory._replace(link=LateLink(gathers.memory.link))  # type: ignore[arg-type]
    if without:  # waits for itself
        counters = getattr(gathers, without)
        setattr(gathers, without, [counters[bmt.rank()]] * size)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for step in range(1, 101):
        if step % size == bmt.rank():
            torch.cuda._sleep(3_000_000)
        shard.fill_(step)
        lane.after(lane.here())
        lane.run(partial(gather, output)).wait()
        shard.fill_(0)
        wrong += (output != step).any()
    assert gathers.number == 100
    return int(wrong)


@pytest.mark.parametrize("size", [2, on_four])
@pytest.mark.parametrize("without", ["", "written", "copied"])
def test_shards_are_copied_after_they_are_written_and_written_after_they_are_copied(
    without: str, size: int
) -> None:
    found = run_ranks(wrong_gathers, size, without, init=INIT)
    assert any(found) == bool(without), found


def ones(size: int) -> Block:
    """A layer whose weights are ones, sharded."""
    layer = nn.Linear(size, size, bias=False, device=current().device)
    nn.init.ones_(layer.weight)
    return Block(layer)


def sums(sizes: list[int]) -> tuple[list[float], list[int]]:
    """Run layers one after another, each dropped before the next; return their outputs, and how
    many mappings are open after each, and after shutdown.
    """
    is_open: list[int] = []
    shared, close = PeerMemory.shared, PeerMemory.close

    def noted(memory: PeerMemory, make: Any) -> Any:
        found = shared(memory, make)
        is_open.extend(found.opened)
        return found

    def closed(memory: PeerMemory, opened: list[int]) -> None:
        for address in opened:  # several times, if several tensors lie in one allocation
            is_open.remove(address)
        close(memory, opened)

    outputs, numbers = [], []
    with patch.object(PeerMemory, "shared", noted), patch.object(PeerMemory, "close", closed):
        for size in sizes:
            layer = ones(size)
            with torch.no_grad():
                outputs.append(float(layer(torch.ones(1, size, device=current().device)).sum()))
            numbers.append(len(is_open))
            del layer
        bmt.shutdown()
    return outputs, [*numbers, len(is_open)]


def test_what_was_mapped_is_given_back() -> None:
    sizes = [16, 4096, 2048, 16]
    for outputs, numbers in run_ranks(sums, 2, sizes, init=INIT, env=ALWAYS):
        assert outputs == [float(size) ** 2 for size in sizes]
        # The first gather of a layer closes those of the layers before.
        assert numbers == [1, 1, 1, 1, 0]


def on_another_stream() -> tuple[bool, int]:
    """Whether a layer computes the same on another stream, and how many copies it makes."""
    layer, rows = ones(16), torch.ones(1, 16, device=current().device)
    with torch.no_grad():
        expected, number = layer(rows), gathered()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            found = layer(rows)
        torch.cuda.synchronize()
    return torch.equal(found, expected), gathered() - number


def test_gathers_on_another_stream() -> None:
    assert run_ranks(on_another_stream, 2, init=INIT, env=ALWAYS) == [(True, 1)] * 2


def large_and_small() -> list[int]:
    """How many copies a small and a large layer make, by default."""
    found = []
    for size in (16, 2048):
        with torch.no_grad():
            ones(size)(torch.ones(1, size, device=current().device))
        found.append(gathered())
    return found


def test_by_default_large_gathers_are_copies() -> None:
    assert run_ranks(large_and_small, 2, init=INIT) == [[0, 1]] * 2


def where_memory_cannot_be_shared() -> tuple[float, int, list[str]]:
    """Return what a layer computes, the number of its gathers by copies, and the warnings."""
    link: Any = current().kernels.peer_link()
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("bmt_zero").addHandler(handler)

    class Refusing:
        def __getattr__(self, name: str) -> Any:
            return getattr(link, name)

        def shared(self, address: int) -> Any:
            if bmt.rank() == 1:
                raise RuntimeError("cudaIpcGetMemHandle: invalid argument")
            return link.shared(address)

    with patch.object(type(current().kernels), "peer_link", lambda kernels: Refusing()):
        layer = ones(16)
        with torch.no_grad():
            found = float(layer(torch.ones(1, 16, device=current().device)).sum())
    logging.getLogger("bmt_zero").removeHandler(handler)
    return found, gathered(), messages


def test_memory_that_one_rank_cannot_share_is_gathered_by_collectives() -> None:
    ranks = run_ranks(where_memory_cannot_be_shared, 2, init=INIT, env=ALWAYS)
    assert [(value, number) for value, number, _ in ranks] == [(256.0, 0)] * 2
    assert "from each other's GPUs: rank 1: cudaIpcGetMemHandle: invalid argument" in ranks[0][2][0]
    assert not ranks[1][2]


def alone_in_a_gather(sleeps: float) -> str:
    layer = ones(16)
    rows = torch.zeros(4, 16, device=current().device)
    layer(rows)
    torch.cuda.synchronize()
    if bmt.rank() == 1:
        time.sleep(sleeps)
        return ""
    try:
        for _ in range(3):
            layer(rows)
            torch.cuda.synchronize()
    except CallError as error:
        return str(error)
    return "nothing was raised"


@pytest.mark.parametrize(
    ("sleeps", "message"),
    [(0.0, "Rank 1 has ended its run"), (30.0, "waited 15 s for rank 1")],
)
def test_a_rank_that_does_not_come_ends_the_others(sleeps: float, message: str) -> None:
    # Not compared, as after the first calls of a group. Connecting takes some of the time, too.
    init = {**INIT, "timeout": 15, "check_calls": False}
    found, _ = run_ranks(alone_in_a_gather, 2, sleeps, init=init, env=ALWAYS, timeout=120)
    assert message in found


def trained_in_bfloat16(level: int) -> tuple[list[torch.Tensor], int]:
    """The losses and parameters of a training whose float32 parts are sent in bfloat16."""
    torch.manual_seed(0)
    layers = [nn.Linear(256, 256, device=current().device) for _ in range(4)]
    for layer in layers:
        Block(layer, zero_level=level, param_dtype=torch.bfloat16)
    optimizer = torch.optim.SGD([p for layer in layers for p in layer.parameters()], lr=0.1)
    found = []
    for _ in range(4):
        optimizer.zero_grad()
        x = torch.ones(8, 256, device=current().device) * (1 + bmt.rank())
        for layer in layers:
            x = x + layer(x).tanh()
        loss = x.float().square().mean()
        loss.backward()
        optimizer.step()
        found.append(loss.detach().cpu())
    return [*found, *(p.detach().cpu() for layer in layers for p in layer.parameters())], gathered()


@pytest.mark.parametrize("level", [1, 2, 3])
def test_casts_are_copied_as_collectives_gather_them(level: int) -> None:
    copied = run_ranks(trained_in_bfloat16, 2, level, init=INIT, env=ALWAYS)
    others = run_ranks(trained_in_bfloat16, 2, level, init=INIT, env=NEVER)
    for (found, number), (expected, none) in zip(copied, others, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        assert number > 0 == none
