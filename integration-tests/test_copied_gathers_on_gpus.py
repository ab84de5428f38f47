"""Gathers by copies between GPUs of one host: every level trains as plain torch does, delays change
nothing, nothing stays mapped, and a rank that does not come ends the others.
"""

from __future__ import annotations

import logging
import time
from functools import cache
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
from bmt_zero.peer_gathers import _AllPeerGathers

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
    made = current().state(_AllPeerGathers)._made.values()
    return sum(0 if each is None else each.number for each in made)


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


def ones(size: int) -> Block:
    """A layer whose weights are ones, sharded."""
    layer = nn.Linear(size, size, bias=False, device=current().device)
    nn.init.ones_(layer.weight)
    return Block(layer)


def sums(sizes: list[int]) -> tuple[list[float], int, int]:
    """Run layers one after another, each dropped before the next; return their outputs, and how
    many mappings were opened and closed.
    """
    opened, closed = [], []
    memory_close = PeerMemory.close

    def close(memory: PeerMemory, mappings: list[int]) -> None:
        closed.extend(mappings)
        memory_close(memory, mappings)

    shared = PeerMemory.shared

    def noted(*arguments: Any) -> Any:
        found = shared(*arguments)
        opened.extend(found.opened)
        return found

    with patch.object(PeerMemory, "shared", noted), patch.object(PeerMemory, "close", close):
        outputs = []
        for size in sizes:
            layer = ones(size)
            outputs.append(float(layer(torch.ones(1, size, device=current().device)).sum()))
            del layer
        bmt.shutdown()
    return outputs, len(opened), len(closed)


def test_what_was_mapped_is_given_back() -> None:
    sizes = [16, 64, 2048, 16]
    for outputs, opened, closed in run_ranks(sums, 2, sizes, init=INIT, env=ALWAYS):
        assert outputs == [float(size) ** 2 for size in sizes]
        assert opened == closed == len(sizes)


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
        found = float(layer(torch.ones(1, 16, device=current().device)).sum())
    logging.getLogger("bmt_zero").removeHandler(handler)
    return found, gathered(), messages


def test_memory_that_one_rank_cannot_share_is_gathered_by_collectives() -> None:
    ranks = run_ranks(where_memory_cannot_be_shared, 2, init=INIT, env=ALWAYS)
    assert [(value, number) for value, number, _ in ranks] == [(256.0, 0)] * 2
    assert "rank 1: cudaIpcGetMemHandle: invalid argument" in "".join(ranks[0][2])
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
    ("sleeps", "message"), [(0.0, "Rank 1 has ended its run"), (8.0, "Rank 0 has waited 4 s")]
)
def test_a_rank_that_does_not_come_ends_the_others(sleeps: float, message: str) -> None:
    # Not compared, as after the first calls of a group.
    init = {**INIT, "timeout": 4, "check_calls": False}
    found, _ = run_ranks(alone_in_a_gather, 2, sleeps, init=init, env=ALWAYS, timeout=60)
    assert message in found
