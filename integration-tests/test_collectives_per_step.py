"""What collectives a model costs beside those of ordinary steps, which are counted in
``invariants/test_collectives.py``, by the recording backend of a third party.
"""

from __future__ import annotations

import itertools
from collections import Counter

import bmt_recording
import pytest
import torch
from torch import nn

from bmt_core import rank
from bmt_params import BlockUse, DistributedParameter
from bmt_testing import run_ranks
from bmt_zero import Block, BMTrainModelWrapper, TransformerBlockList

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


def gathered_by_a_list() -> Counter[str]:
    """What the forward of three blocks that use one parameter issues, without what is gathered for
    the blocks themselves.
    """
    scale = DistributedParameter(torch.ones(8))
    blocks = TransformerBlockList([Block(Sharing(scale), zero_level=0) for _ in range(3)])
    bmt_recording.clear()
    blocks(torch.ones(2, 8))
    return Counter(call.op for call in bmt_recording.calls)


def test_the_blocks_of_a_list_gather_what_they_share_once() -> None:
    assert (
        run_ranks(gathered_by_a_list, 2, init={"comm_backend": "recording"})
        == [Counter({"all_gather": 1 + COMPARISON})] * 2
    )


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


def counted_outside() -> list[list[str]]:
    model = BMTrainModelWrapper(LanguageModel())
    optimizer = torch.optim.AdamW(model.parameters())
    seen = []
    for _ in range(3):
        bmt_recording.clear()
        model(torch.arange(8).view(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append([call.op for call in bmt_recording.calls])
    return seen


def test_what_is_outside_of_blocks_is_one_gather_and_one_reduction_per_step() -> None:
    for first, *later in run_ranks(counted_outside, 2, init={"comm_backend": "recording"}):
        assert Counter(first) == {"all_gather": 1 + 4 + COMPARISON, "reduce_scatter": 1 + 2}
        # The blocks of this short model stay gathered from forward to backward.
        assert [Counter(step) for step in later] == [
            {"all_gather": 1 + 2, "reduce_scatter": 1 + 2}
        ] * 2


class Experts(nn.Module):
    """Two layers, of which a call reads those that it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ParameterDict({"a": torch.ones(2, 256), "b": torch.ones(4, 256)})

    def forward(self, names: str) -> torch.Tensor:
        return torch.cat([self.layers[name] for name in names]).sum()


def counted_reads(plan: list[str]) -> tuple[list[list[tuple[str, int]]], bool]:
    """What each call and its backward move, and whether every rank's elements stayed the
    same ones.
    """
    model = BMTrainModelWrapper(Experts())
    before = [(p.shape, p._shard.start, p._shard.end) for p in model.parameters()]  # type: ignore[attr-defined]
    seen = []
    for names in plan:
        bmt_recording.clear()
        model(names).backward()
        seen.append([(call.op, call.bytes // 1024) for call in bmt_recording.calls])
    return seen, before == [(p.shape, p._shard.start, p._shard.end) for p in model.parameters()]  # type: ignore[attr-defined]


def test_outside_of_blocks_what_the_last_call_read_is_gathered() -> None:
    # a is 2 KiB and b is 4, and of b each rank has 2; half a KiB of a rank's row tells which
    # gradients are there.
    for seen, are_same in run_ranks(
        counted_reads, 2, ["a", "a", "ab", "ab", "b"], init={"comm_backend": "recording"}
    ):
        assert are_same
        gathers = [[size for op, size in calls if op == "all_gather"] for calls in seen]
        reductions = [
            sorted(size for op, size in calls if op == "reduce_scatter") for calls in seen
        ]
        # Not expected, b comes by itself.
        assert gathers == [[0] * COMPARISON + [7], [3], [3, 4], [3, 5], [3, 5]]
        assert reductions == [[7], [3], [3, 4], [3, 5], [5]]


def evaluated(level: int) -> list[str]:
    block = Block(nn.Linear(8, 8), zero_level=level)
    bmt_recording.clear()
    with torch.no_grad():
        block(torch.ones(2, 8))
        block(torch.ones(2, 8))
    return [call.op for call in bmt_recording.calls]


def test_evaluation_gathers_once_per_call_and_once_for_good_at_level_1() -> None:
    for level, gathers in enumerate((0, 1, 2, 2)):
        for calls in run_ranks(evaluated, 2, level, init=RECORDING):
            assert calls == ["all_gather"] * (gathers + COMPARISON), level


def bytes_on_the_wire(dtype: torch.dtype) -> dict[str, int]:
    block = Block(nn.Linear(256, 256, bias=False, dtype=dtype), zero_level=3)
    bmt_recording.clear()
    block(torch.ones(2, 256, dtype=dtype)).sum().backward()
    return {call.op: call.bytes for call in bmt_recording.calls}


def test_gathers_and_reductions_carry_the_parameters_dtype() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        size = 65536 * dtype.itemsize
        for seen in run_ranks(bytes_on_the_wire, 2, dtype, init=RECORDING):
            assert seen == {"all_gather": size, "reduce_scatter": size}


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
    return [(call.op, call.bytes) for call in bmt_recording.calls]


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
    return [(call.op, call.bytes) for call in bmt_recording.calls]


@pytest.mark.parametrize("prefetch_bytes", [0, 600])
def test_a_result_that_one_rank_keeps_changes_no_collective(prefetch_bytes: int) -> None:
    init = {**RECORDING, "prefetch_bytes": prefetch_bytes, "timeout": 20}
    for level, is_first in itertools.product((1, 2, 3), (True, False)):
        use = BlockUse(first_backward=is_first)
        first, second = run_ranks(with_unused_results, 2, level, use, init=init)
        assert first == second and first, (level, is_first)
