"""Trainings of a model of parallel layers in Blocks, compared with the dense model in
one process.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import bmt_recording
import pytest
import torch
from compile_models import from_new
from pipeline_trainings import Record
from tensor_trainings import SEQUENCE, SETTINGS, check, sharded, step, thirty_steps
from torch import nn
from tp_models import Net, fill, tp

import bmt_checkpoint
import bmt_core
import bmt_params
from bmt_core.errors import ConfigError
from bmt_optim import AdamOptimizer, OptimManager
from bmt_testing import on_ranks, run_ranks
from bmt_tp import ColumnParallelLinear, RowParallelLinear
from bmt_zero import Block, BMTrainModelWrapper
from bmt_zero.call_gradients import FlatGradients
from cells import cells

CASES = [
    ("tp 4", 1, True),
    ("dp 2", 2, False),
    ("tp 2", 0, False),
    ("tp 2 x dp 2", 2, True),
    ("tp 2 x dp 2", 3, False),
]


@pytest.mark.parametrize(("grid", "level", "recomputes"), CASES)
def test_training_equals_the_dense_model(grid: str, level: int, recomputes: bool) -> None:
    check(grid, block={"zero_level": level, "use_checkpoint": recomputes})


@pytest.mark.parametrize(("grid", "optimizer"), [("tp 2", "offload"), ("tp 2 x dp 2", "adam")])
def test_every_optimizer(grid: str, optimizer: str) -> None:
    check(grid, optimizer=optimizer, dtype=torch.float32)


def test_one_sequence() -> None:
    check("tp 4", batch=1)


def test_gathered_once_for_all_layers_or_in_one_piece() -> None:
    check("tp 2", options={"async_gather_chunks": 1})
    check("tp 2", options={"async_gather_chunks": None})


def in_place_training(*arguments: Any) -> Record:
    """Train as ``sharded`` does; no gradient of a matrix is copied to where it is reduced from."""
    complete = FlatGradients.complete

    def checked(full: FlatGradients, grads: Any, wanted: Any) -> torch.Tensor:
        matrices = [
            (view, grad) for view, grad in zip(full._views, grads, strict=True) if view.dim() == 2
        ]
        assert all(grad is None or grad.data_ptr() == view.data_ptr() for view, grad in matrices)
        return complete(full, grads, wanted)

    with patch.object(FlatGradients, "complete", checked):
        return sharded(*arguments)


def traced_in_place_training(*arguments: Any) -> Record:
    """Train so with what torch traced, before it generates code from it."""
    with from_new("aot_eager"):
        return in_place_training(*arguments)


@pytest.mark.parametrize(
    ("use_checkpoint", "training"),
    # Code of recomputations is generated in the tests of bmt-zero.
    [
        (True, traced_in_place_training),
        pytest.param(False, in_place_training, marks=pytest.mark.slow("bmt-tp", "bmt-zero")),
    ],
)
def test_compiled_blocks(use_checkpoint: bool, training: Callable[..., Record]) -> None:
    block = {"compile": True, "use_checkpoint": use_checkpoint}
    check("tp 2", training=training, dtype=torch.float32, block=block)


# ---- what travels ----


@on_ranks(4, init={"tp_size": 4, "comm_backend": "recording"})
@cells(
    "kind, use_checkpoint, chunks",
    [("column", False, 1), ("row", False, 2), ("column", True, 2), ("row", True, 1)],
)
def test_volume_is_what_the_docstring_says(kind: str, use_checkpoint: bool, chunks: int) -> None:
    """(W - 1)/W of rows x features: the input in forward, its gradient in backward, and the input
    again for the weight's.
    """
    rows, features, wide = 12, 8, 16
    if kind == "column":
        layer: nn.Module = ColumnParallelLinear(features, wide, async_gather_chunks=chunks)
        x = torch.ones(rows // 4, features, requires_grad=True)
    else:
        layer = RowParallelLinear(wide, features, async_chunks=chunks)
        x = torch.ones(rows, wide // 4, requires_grad=True)
    bmt_params.init_parameters(layer)
    block = Block(layer, use_checkpoint=use_checkpoint)

    def elements_sent() -> int:
        return sum(call.numel for call in bmt_recording.calls if call.op == "send")

    once = 3 * rows * features // 4
    bmt_recording.clear()
    output = block(x)
    assert elements_sent() == once
    bmt_recording.clear()
    output.sum().backward()
    # A recomputation ends before the product of the only layer, and gathers nothing for it.
    assert elements_sent() == (2 * once if kind == "column" else once)


# ---- files, initial values, random numbers ----


def trained_and_saved(path: str) -> dict[str, torch.Tensor]:
    model = Net(torch.float32, wrap=Block)
    model.load_state_dict(fill(model))
    manager = OptimManager()
    manager.add_optimizer(AdamOptimizer(model.parameters(), lr=0.1, **SETTINGS["adam"]))
    step(model, manager)
    bmt_checkpoint.save(model, path)
    state = manager.state_dict(gather_opt=True)
    if bmt_core.rank() == 0:
        torch.save(state, f"{path}.optim")
    step(model, manager)
    return dict(model.state_dict())


def loaded_and_trained(path: str) -> dict[str, torch.Tensor]:
    model = Net(torch.float32, wrap=Block)
    bmt_checkpoint.load(model, path)
    manager = OptimManager()
    manager.add_optimizer(AdamOptimizer(model.parameters(), lr=0.1, **SETTINGS["adam"]))
    manager.load_state_dict(torch.load(f"{path}.optim", weights_only=True))
    step(model, manager)
    return dict(model.state_dict())


def test_a_file_of_four_ranks_along_tp_goes_on_with_two_and_one(tmp_path: Path) -> None:
    path = str(tmp_path / "model.pt")
    after = run_ranks(trained_and_saved, 4, path, init={"tp_size": 4})[0]
    plain = Net(torch.float32)
    # Whole tensors, by the dense model's names.
    plain.load_state_dict(torch.load(path, weights_only=True))
    for ranks, tp_size in ((4, 2), (1, 1)):
        for found in run_ranks(loaded_and_trained, ranks, path, init={"tp_size": tp_size}):
            for name, value in found.items():
                torch.testing.assert_close(
                    value, after[name], rtol=1e-4, atol=1e-5, msg=lambda t, n=name: f"{n}: {t}"
                )


def initialised() -> dict[str, torch.Tensor]:
    model = Net(torch.float32, wrap=Block)
    bmt_params.init_parameters(model)
    return dict(model.state_dict())


def test_initial_values_do_not_depend_on_tp() -> None:
    (one,) = run_ranks(initialised, 1, init={"seed": 4})
    for ranks, tp_size in ((2, 2), (4, 2)):
        for found in run_ranks(initialised, ranks, init={"tp_size": tp_size, "seed": 4}):
            assert all(torch.equal(value, one[name]) for name, value in found.items())


def dropped(recompute: bool) -> list[torch.Tensor]:
    """Output, gradient of the input, and what is drawn afterwards, of this rank's rows of an input
    that is the same in all rows.
    """
    model = Net(
        torch.float64,
        layers=1,
        dropout=0.5,
        wrap=lambda layer: Block(layer, use_checkpoint=recompute),
    )
    model.load_state_dict(fill(model))
    torch.manual_seed(8)
    index, size = tp()
    x = torch.ones(SEQUENCE, 1, 8, dtype=torch.float64, requires_grad=True)
    output = model.layers[0](x.chunk(size)[index])
    output.pow(2).sum().backward()
    assert x.grad is not None
    return [output.detach(), x.grad.chunk(size)[index], torch.rand(2)]


def feed_forward() -> nn.Sequential:
    torch.manual_seed(5)
    up = ColumnParallelLinear(8, 12, bias=False, gather_input=False)
    return nn.Sequential(
        up, nn.ReLU(), RowParallelLinear(12, 8, bias=False, all_reduce_output=True)
    )


@on_ranks(2, init={"tp_size": 2})
def test_layers_whose_values_nobody_drew_are_initialised_by_the_wrapper_or_refused() -> None:
    with pytest.raises(ConfigError, match=r"Parameters 0\.weight, 2\.weight of .* have no values"):
        Block(feed_forward())(torch.ones(2, 8))
    wrapped = BMTrainModelWrapper(feed_forward())
    initialized = feed_forward()
    bmt_params.init_parameters(initialized)
    assert Block(initialized)(torch.ones(2, 8)).isfinite().all()
    for found, expected in zip(wrapped.parameters(), initialized.parameters(), strict=True):
        assert torch.equal(found.gather_all(), expected.gather_all())  # type: ignore[operator]


def test_dropout_differs_between_parts_and_repeats_in_recomputation() -> None:
    kept = run_ranks(dropped, 2, False, init={"tp_size": 2})
    again = run_ranks(dropped, 2, True, init={"tp_size": 2})
    for one, other in zip(kept, again, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    # Rows of one value differ by their dropout alone.
    assert not torch.equal(kept[0][0], kept[1][0])
    assert torch.equal(kept[0][2], kept[1][2])  # afterwards the ranks draw alike again


def test_what_is_replicated_stays_bit_identical_for_thirty_steps() -> None:
    for values in run_ranks(thirty_steps, 2, init={"tp_size": 2}, timeout=120):
        assert values and all(torch.equal(value, value[:1].expand_as(value)) for value in values)


@on_ranks(2, init=None)
def test_a_world_that_tp_does_not_divide_is_refused() -> None:
    refusal = r"^2 ranks cannot be divided by tp_size=3\. Change tp_size, or start"
    with pytest.raises(ConfigError, match=refusal):
        bmt_core.init_distributed(tp_size=3)


@on_ranks(2, init={"tp_size": 2})
def test_copies_keep_their_slices() -> None:
    model = Net(torch.float64, wrap=Block)
    model.load_state_dict(fill(model))
    twin = copy.deepcopy(model)
    for (name, one), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(one, other) and one.locality == other.locality, name  # type: ignore[attr-defined]
