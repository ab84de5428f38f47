"""Parallel layers on GPUs: with delays on any stream, over both backends, compiled, and in
half precision.
"""

from __future__ import annotations

import time
from typing import Any
from unittest.mock import patch

import pytest
import torch
from delays import PLACES, Where, delayed
from pipeline_trainings import Record
from tensor_trainings import GRIDS, check, sharded, thirty_steps

import bmtrain as bmt
from bmt_core.errors import CallError
from bmt_core.run.runtime import current
from bmt_params.modules.postponed_gradients import postpone_weight_gradients
from bmt_testing import run_ranks
from bmt_tp import overlapped_products, row_transfers
from bmt_zero import Block

pytestmark = pytest.mark.gpu(2)
CUDA = {"device": "cuda"}


def on_gpus(grid: str, *others: Any) -> Any:
    """Return test parameters that begin with ``grid`` and need a GPU for each of its ranks."""
    return pytest.param(grid, *others, marks=pytest.mark.gpu(GRIDS[grid][0]))


def delayed_training(*arguments: Any) -> Record:
    """Train with delays in one place, in pieces however small; the arguments are those of
    ``sharded`` and that place.
    """
    *given, where = arguments
    with delayed(where), patch.object(overlapped_products, "MIN_ROWS", 1):
        return sharded(*given)


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize(
    ("grid", "level", "chunks"),
    [
        on_gpus("tp 2", 0, 1),
        on_gpus("tp 2", 1, 2),
        on_gpus("tp 2", 2, 2),
        on_gpus("tp 2", 3, 3),
        on_gpus("tp 4", 0, 2),
        on_gpus("tp 2 x dp 2", 3, 2),
    ],
)
def test_delays_change_nothing(grid: str, level: int, chunks: int, where: Where) -> None:
    block = {"zero_level": level, "use_checkpoint": level % 2 == 1}
    options = {"async_gather_chunks": chunks}
    check(
        grid, training=delayed_training, arguments=(where,), init=CUDA, block=block, options=options
    )


@pytest.mark.parametrize("backend", ["torch", "nccl-native"])
@pytest.mark.parametrize(
    ("grid", "level"),
    [on_gpus("tp 2", 3), on_gpus("tp 4", 1), on_gpus("tp 2 x dp 2", 2), on_gpus("tp 2 x dp 2", 3)],
)
def test_training_equals_the_dense_model(grid: str, level: int, backend: str) -> None:
    check(grid, init={**CUDA, "comm_backend": backend}, block={"zero_level": level})


@pytest.mark.parametrize("compiles", [True, False])
@pytest.mark.parametrize("optimizer", ["adam", "offload"])
def test_optimizers_and_compiled_blocks(optimizer: str, compiles: bool) -> None:
    check("tp 2", dtype=torch.float32, optimizer=optimizer, init=CUDA, block={"compile": compiles})


def test_what_is_replicated_stays_bit_identical_for_thirty_steps() -> None:
    for values in run_ranks(thirty_steps, 2, init={"tp_size": 2, **CUDA}, timeout=120):
        assert values and all(torch.equal(value, value[:1].expand_as(value)) for value in values)


def transfers_taken(shapes: list[tuple[int, ...]]) -> tuple[list[str], bool]:
    """Run a layer on inputs of these shapes; return which transfers it has made, and whether the
    last output is right.
    """
    taken: list[str] = []
    begin = row_transfers.begin_transfer

    def noted(*arguments: Any, **options: Any) -> row_transfers.RowTransfer:
        taken.append(type(made := begin(*arguments, **options)).__name__)
        return made

    layer = bmt.nn.ColumnParallelLinear(
        16, 8, gather_input=True, gather_output=True, dtype=torch.float64
    )
    bmt.init_parameters(layer)
    device, whole, found = current().device, torch.empty(0), torch.empty(0)
    with patch.object(overlapped_products, "begin_transfer", noted):
        for number, shape in enumerate(shapes):
            generator = torch.Generator().manual_seed(number)
            whole = torch.randn(
                bmt.world_size() * shape[0], *shape[1:], generator=generator, dtype=torch.float64
            )
            found = layer(whole.tensor_split(bmt.world_size())[bmt.rank()].to(device))
    weight, bias = (
        bmt.distributed.all_gather(part.data).flatten(0, 1) for part in (layer.weight, layer.bias)
    )
    expected = torch.nn.functional.linear(whole.to(device), weight, bias)
    return taken, torch.allclose(found, expected)


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.gpu(4))])
def test_rows_travel_by_copies_between_devices_also_when_they_grow(size: int) -> None:
    shapes = [(4, 16), (40, 16), (3, 5, 16), (400, 16), (4, 16)]
    for taken, is_right in run_ranks(transfers_taken, size, shapes, init={"tp_size": size, **CUDA}):
        assert taken == ["PeerTransfer"] * len(shapes)
        assert is_right


def evaluated_and_trained() -> bool:
    """Whether a layer trains whose first exchange of rows was that of an evaluation."""
    layer = bmt.nn.ColumnParallelLinear(16, 8, gather_input=True)
    bmt.init_parameters(layer)
    rows = torch.ones(4, 16, device=current().device)
    with torch.inference_mode():
        expected = layer(rows)
    found = layer(rows.requires_grad_())
    found.sum().backward()
    return torch.equal(found, expected) and rows.grad is not None


def test_training_after_an_evaluation_that_was_the_first_to_exchange_rows() -> None:
    assert all(run_ranks(evaluated_and_trained, 2, init={"tp_size": 2, **CUDA}))


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.gpu(4))])
def test_without_the_compiled_kernels_rows_travel_by_collectives(size: int) -> None:
    env = {"BMT_KERNELS": "reference"}
    for taken, is_right in run_ranks(
        transfers_taken, size, [(4, 16)], init={"tp_size": size, **CUDA}, env=env
    ):
        assert taken == ["LaneTransfer"]
        assert is_right


def input_written_after_the_layer() -> bool:
    """Whether every rank gets the rows that the others had when they called the layer, which write
    to them right after it.
    """
    layer = bmt.nn.ColumnParallelLinear(64, 64, gather_input=True, bias=False)
    bmt.init_parameters(layer)
    rows = torch.ones(4096, 64, device=current().device)
    with torch.no_grad(), delayed("before collectives"):
        expected = layer(rows)
        for _ in range(5):
            found = layer(rows)
            rows.zero_()
            torch.cuda.synchronize()
            if not torch.equal(found, expected):
                return False
            rows.fill_(1)
    return True


def test_an_input_may_be_written_to_after_the_layer() -> None:
    assert all(run_ranks(input_written_after_the_layer, 2, init={"tp_size": 2, **CUDA}))


def postponed_gradients() -> float:
    """How far gradients of weights that are computed after later exchanges are from those of an
    ordinary backward.
    """
    torch.manual_seed(3)
    layers = torch.nn.Sequential(
        bmt.nn.ColumnParallelLinear(64, 128), bmt.nn.RowParallelLinear(128, 64)
    )
    bmt.init_parameters(layers)
    block = Block(layers, use_checkpoint=False, zero_level=1)
    torch.manual_seed(4 + bmt.rank())
    batches = torch.randn(4, 512, 64, device=current().device, requires_grad=True)
    for rows in batches:
        block(rows).square().sum().backward()
    expected = torch.cat([p.grad.flatten() for p in block.parameters()])
    block.zero_grad(set_to_none=True)
    left = []
    for rows in batches:
        with postpone_weight_gradients() as postponed:
            block(rows).square().sum().backward()
        left.append(postponed)
    for postponed in left:
        postponed.compute()
    found = torch.cat([p.grad.flatten() for p in block.parameters()])
    return float((found - expected).norm() / expected.norm())


def test_postponed_gradients_do_not_read_what_later_exchanges_write() -> None:
    assert max(run_ranks(postponed_gradients, 2, init={"tp_size": 2, **CUDA})) < 1e-5


def alone_in_a_layer(sleeps: float) -> str:
    layer = bmt.nn.ColumnParallelLinear(16, 8, gather_input=True)
    bmt.init_parameters(layer)
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
    ("sleeps", "expected"), [(0.0, "Rank 1 has ended its run"), (8.0, "Rank 0 has waited 4 s")]
)
def test_a_rank_that_does_not_come_ends_the_others(sleeps: float, expected: str) -> None:
    message, _ = run_ranks(
        alone_in_a_layer, 2, sleeps, init={"tp_size": 2, "timeout": 4, **CUDA}, timeout=60
    )
    assert expected in message
