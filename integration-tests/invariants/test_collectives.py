"""The collectives of a step are those of the formulas in docs/architecture.md, counted
by the recording backend of a third party.
"""

from __future__ import annotations

import operator
from collections import Counter
from contextlib import nullcontext

import bmt_recording
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from bmt_testing import run_ranks
from bmt_zero import Block, BMTrainModelWrapper, no_sync

KEPT = 2
"""At level 3 so many Blocks stay gathered from forward to backward, once steps have shown the
order: those whose backward begins first.
"""


def formula(level: int, blocks: int, micro_batches: int, *, in_no_sync: bool) -> Counter[str]:
    reductions = 1 if in_no_sync and level < 2 else micro_batches
    if level == 0:
        return Counter(all_reduce=reductions * blocks)
    gathers = {
        1: reductions * blocks,
        2: micro_batches * blocks,
        3: micro_batches * (2 * blocks - min(blocks, KEPT)),
    }
    return Counter(all_gather=gathers[level], reduce_scatter=reductions * blocks)


def settled_step(
    level: int,
    blocks: int,
    micro_batches: int,
    recomputes: bool,
    in_no_sync: bool,
    outside: bool = False,
) -> tuple[Counter[str], Counter[str]]:
    """Return how many collectives the third step makes, and how many bytes they carry.
    ``outside``: a layer before and a layer after the Blocks are in none.
    """
    layers = [nn.Linear(32, 32, bias=False) for _ in range(blocks)]
    for layer in layers:
        Block(layer, zero_level=level, use_checkpoint=recomputes)
    model = nn.Sequential(*layers)
    if outside:
        first, last = nn.Linear(32, 32, bias=False), nn.Linear(32, 16, bias=False)
        model = BMTrainModelWrapper(nn.Sequential(first, *layers, last))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        bmt_recording.clear()
        for micro_batch in range(micro_batches):
            holds_back = in_no_sync and micro_batch < micro_batches - 1
            with no_sync(model) if holds_back else nullcontext():
                model(torch.ones(2, 32)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    number = Counter(call.op for call in bmt_recording.calls)
    size: Counter[str] = Counter()
    for call in bmt_recording.calls:
        size[call.op] += call.bytes
    return number, size


@settings(max_examples=12)
@given(
    st.integers(0, 3),
    st.integers(1, 5),
    st.integers(1, 3),
    st.booleans(),
    st.booleans(),
    st.sampled_from([2, 4]),
)
def test_a_step_makes_the_collectives_of_the_formula_each_of_a_blocks_bytes(
    level: int, blocks: int, micro_batches: int, recomputes: bool, in_no_sync: bool, ranks: int
) -> None:
    expected = formula(level, blocks, micro_batches, in_no_sync=in_no_sync)
    block_bytes = 32 * 32 * 4
    init = {"comm_backend": "recording", "gradients": "mean"}
    for number, size in run_ranks(
        settled_step, ranks, level, blocks, micro_batches, recomputes, in_no_sync, init=init
    ):
        assert number == expected
        assert size == Counter({op: count * block_bytes for op, count in expected.items()})


@settings(max_examples=10)
@given(st.integers(0, 3), st.integers(1, 4), st.integers(1, 2), st.booleans())
def test_with_a_shard_size_gathers_stay_among_its_ranks_and_parts_are_summed_over_the_others(
    level: int, blocks: int, micro_batches: int, in_no_sync: bool
) -> None:
    near = formula(level, blocks, micro_batches, in_no_sync=in_no_sync)
    reductions = near["all_reduce"] + near["reduce_scatter"]
    init = {"comm_backend": "recording", "gradients": "mean", "shard_size": 2}
    for rank, (number, size) in enumerate(
        run_ranks(by_ranks, 4, level, blocks, micro_batches, in_no_sync, init=init)
    ):
        own, replicas = (rank // 2 * 2, rank // 2 * 2 + 1), (rank % 2, rank % 2 + 2)
        expected = Counter({(op, own): count for op, count in near.items()})
        expected["all_reduce", replicas] += reductions
        assert number == expected
        part = 32 * 32 * 4 // (1 if level == 0 else 2)
        assert size["all_reduce", replicas] == reductions * part
        for op, count in near.items():
            assert size[op, own] == count * 32 * 32 * 4


@settings(max_examples=10)
@given(st.integers(0, 3), st.integers(1, 4), st.integers(1, 2), st.booleans())
def test_parts_are_gathered_among_the_others_once_for_each_reduction_that_an_update_may_follow(
    level: int, blocks: int, micro_batches: int, in_no_sync: bool
) -> None:
    near = formula(level, blocks, micro_batches, in_no_sync=in_no_sync)
    init = {"comm_backend": "recording", "gradients": "mean"}
    init |= {"shard_size": 2, "optimizer_shards": "all"}
    for rank, (number, size) in enumerate(
        run_ranks(by_ranks, 4, level, blocks, micro_batches, in_no_sync, init=init)
    ):
        own, others = (rank // 2 * 2, rank // 2 * 2 + 1), (rank % 2, rank % 2 + 2)
        if level == 0:  # all ranks are one group
            own = (0, 1, 2, 3)
        expected = Counter({(op, own): count for op, count in near.items()})
        if level > 0:
            expected["all_gather", others] = blocks * (1 if in_no_sync else micro_batches)
            expected["reduce_scatter", others] = near["reduce_scatter"]
        assert number == expected
        for (op, ranks), count in expected.items():
            assert size[op, ranks] == count * 32 * 32 * 4 // (2 if ranks == others else 1)


@settings(max_examples=10)
@given(
    st.integers(0, 3),
    st.integers(1, 2),
    st.booleans(),
    st.sampled_from([(None, None), (2, None), (2, "all")]),
)
def test_outside_of_blocks_each_micro_batch_gathers_once_and_reduces_once_at_every_level(
    level: int, micro_batches: int, in_no_sync: bool, shards: tuple[int | None, str | None]
) -> None:
    shard_size, optimizer_shards = shards
    init = {"comm_backend": "recording", "gradients": "mean"}
    init |= {"shard_size": shard_size, "optimizer_shards": optimizer_shards}
    for rank, (number, size) in enumerate(
        run_ranks(outside_by_ranks, 4, level, micro_batches, in_no_sync, init=init)
    ):
        group, replicas = (0, 1, 2, 3), (rank % 2, rank % 2 + 2)
        if shards == (2, None):
            group = (rank // 2 * 2, rank // 2 * 2 + 1)
        # Both layers, and from each rank of the group 512 bytes of flags.
        carried = (32 * 32 + 32 * 16) * 4 + 512 * len(group)
        expected = {("all_gather", group): carried, ("reduce_scatter", group): carried}
        if shards == (2, None):
            expected["all_reduce", replicas] = carried // len(group)
        assert number == Counter(dict.fromkeys(expected, micro_batches))
        assert size == Counter({call: micro_batches * bytes for call, bytes in expected.items()})


def outside_by_ranks(level: int, micro_batches: int, in_no_sync: bool) -> tuple[Counts, Counts]:
    """Return what :func:`by_ranks` does of the calls that layers outside of two Blocks add."""
    with_layers = by_ranks(level, 2, micro_batches, in_no_sync, outside=True)
    without = by_ranks(level, 2, micro_batches, in_no_sync)
    assert not without[0] - with_layers[0]  # those of the Blocks are the same
    number, size = map(operator.sub, with_layers, without)
    return number, size


Counts = Counter[tuple[str, tuple[int, ...]]]


def by_ranks(
    level: int, blocks: int, micro_batches: int, in_no_sync: bool, outside: bool = False
) -> tuple[Counts, Counts]:
    """Return how many collectives among which ranks the third step makes, and their bytes."""
    settled_step(level, blocks, micro_batches, True, in_no_sync, outside)
    size: Counts = Counter()
    for call in bmt_recording.calls:
        size[call.op, call.ranks] += call.bytes
    return Counter((call.op, call.ranks) for call in bmt_recording.calls), size
