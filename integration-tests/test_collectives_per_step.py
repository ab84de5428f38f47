"""What collectives a model costs beside those of ordinary steps, which are counted in
``invariants/test_collectives.py``, by the recording backend of a third party.
"""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import bmt_recording
import pytest
import torch
from torch import nn

from bmt_core import rank
from bmt_params import BlockUse, DistributedParameter
from bmt_testing import on_ranks, run_ranks
from bmt_zero import Block, BMTrainModelWrapper, TransformerBlockList
from cells import cells, run_cells

RECORDING = {"comm_backend": "recording"}
COMPARISON = 1
"""The all-gathers of a model's first call, by which ranks compare the values they begin with."""


class Sharing(nn.Module):
    """Multiplies by a parameter of somebody else's."""

    def __init__(self, scale: DistributedParameter) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.scale = scale
        scale._shared = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.scale  # type: ignore[no-any-return]


@on_ranks(2, init=RECORDING)
def test_the_blocks_of_a_list_gather_what_they_share_once() -> None:
    """Level 0 gathers nothing for the blocks themselves."""
    scale = DistributedParameter(torch.ones(8))
    blocks = TransformerBlockList([Block(Sharing(scale), zero_level=0) for _ in range(3)])
    bmt_recording.clear()
    blocks(torch.ones(2, 8))
    assert Counter(ops()) == {"all_gather": 1 + COMPARISON}


def ops() -> list[str]:
    return [call.op for call in bmt_recording.calls]


def calls() -> list[tuple[str, int]]:
    return [(call.op, call.bytes) for call in bmt_recording.calls]


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(x)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(self.norm(hidden))  # type: ignore[no-any-return]


@on_ranks(2, init=RECORDING)
def test_what_is_outside_of_blocks_is_one_gather_and_one_reduction_per_step() -> None:
    model = BMTrainModelWrapper(LanguageModel())
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(3):
        bmt_recording.clear()
        model(torch.arange(8).view(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        # The blocks of this short model stay gathered from forward to backward.
        gathers = 2 if step else 4 + COMPARISON
        assert Counter(ops()) == {"all_gather": 1 + gathers, "reduce_scatter": 1 + 2}


class Experts(nn.Module):
    """Two layers, of which a call reads those that it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ParameterDict({"a": torch.ones(2, 256), "b": torch.ones(4, 256)})

    def forward(self, names: str) -> torch.Tensor:
        return torch.cat([self.layers[name] for name in names]).sum()


@on_ranks(2, init=RECORDING)
def test_outside_of_blocks_what_the_last_call_read_is_gathered() -> None:
    # a is 2 KiB and b is 4, and of b each rank has 2; half a KiB of a rank's row tells which
    # gradients are there.
    model = BMTrainModelWrapper(Experts())
    before = elements_of(model)
    plan: list[tuple[str, list[int], list[int]]] = [
        ("a", [0] * COMPARISON + [7], [7]),
        ("a", [3], [3]),
        ("ab", [3, 4], [3, 4]),  # not expected, b comes by itself
        ("ab", [3, 5], [3, 5]),
        ("b", [3, 5], [5]),
    ]
    for names, gathers, reductions in plan:
        bmt_recording.clear()
        model(names).backward()
        assert [size // 1024 for op, size in calls() if op == "all_gather"] == gathers
        reduced = [size // 1024 for op, size in calls() if op == "reduce_scatter"]
        assert sorted(reduced) == reductions
    assert elements_of(model) == before


def elements_of(model: nn.Module) -> list[Any]:
    """Which elements of each parameter this rank has."""
    return [(p.shape, p._shard.start, p._shard.end) for p in model.parameters()]  # type: ignore[attr-defined]


@on_ranks(2, init=RECORDING)
@cells("level, gathers", enumerate((0, 1, 2, 2)))
def test_evaluation_gathers_once_per_call_and_once_for_good_at_level_1(
    level: int, gathers: int
) -> None:
    block = Block(nn.Linear(8, 8), zero_level=level)
    bmt_recording.clear()
    with torch.no_grad():
        block(torch.ones(2, 8))
        block(torch.ones(2, 8))
    assert ops() == ["all_gather"] * (gathers + COMPARISON)


@on_ranks(2, init=RECORDING)
@cells("dtype", [torch.float32, torch.bfloat16])
def test_gathers_and_reductions_carry_the_parameters_dtype(dtype: torch.dtype) -> None:
    block = Block(nn.Linear(256, 256, bias=False, dtype=dtype), zero_level=3)
    bmt_recording.clear()
    block(torch.ones(2, 256, dtype=dtype)).sum().backward()
    size = 65536 * dtype.itemsize
    assert dict(calls()) == {"all_gather": size, "reduce_scatter": size}


def after_a_failure(level: int) -> list[tuple[str, int]]:
    """Return the collectives of two steps after a backward pass that failed, and of which rank 0
    keeps the graph.
    """
    blocks = [Block(nn.Linear(8, 8), zero_level=level) for _ in range(4)]

    def fail(grad: torch.Tensor) -> None:
        raise InterruptedError

    hidden = blocks[1](blocks[0](torch.ones(2, 8)))
    hidden.register_hook(fail)
    loss = blocks[3](blocks[2](hidden)).sum()
    with pytest.raises(InterruptedError):
        loss.backward()
    kept = (loss, hidden) if rank() == 0 else None
    del loss, hidden
    bmt_recording.clear()
    for _ in range(2):
        x = torch.ones(2, 8)
        for number in (2, 0, 1, 0, 3):
            x = blocks[number](x)
        x.sum().backward()
    del kept
    return calls()


@pytest.mark.parametrize("level", [2, 3])
def test_a_failed_graph_that_one_rank_keeps_changes_no_collective(level: int) -> None:
    init = {"comm_backend": "recording", "prefetch_bytes": 0, "timeout": 20}
    first, second = run_ranks(after_a_failure, 2, level, init=init)
    assert first == second and len(first) > 8


def with_unused_results(level: int, use: BlockUse) -> list[tuple[str, int]]:
    """Return the collectives of three steps, in each of which rank 0 keeps a result that no rank
    uses, with its graph.
    """
    blocks = [Block(nn.Linear(8, 8), zero_level=level) for _ in range(4)]
    kept = []
    bmt_recording.clear()
    for step in range(3):
        for is_used in (False, True):
            x = torch.ones(2, 8)
            for number in (2, 0, 1, 0, 3):
                blocks[number].set_use(BlockUse(last_backward=step == 2) if is_used else use)
                x = blocks[number](x)
            if is_used:
                x.sum().backward()
            elif rank() == 0:
                kept.append(x)
            del x
    return calls()


@pytest.mark.parametrize("prefetch_bytes", [0, 600])
def test_a_result_that_one_rank_keeps_changes_no_collective(prefetch_bytes: int) -> None:
    init = {**RECORDING, "prefetch_bytes": prefetch_bytes, "timeout": 20}
    uses = [BlockUse(first_backward=is_first) for is_first in (True, False)]
    cells = itertools.product((1, 2, 3), uses)
    for cell, (first, second) in run_cells(with_unused_results, 2, cells, init=init):
        assert first == second and first, cell
