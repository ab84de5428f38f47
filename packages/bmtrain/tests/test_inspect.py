"""``inspect``: statistics of parameters and recorded tensors, against plain torch on
one process.
"""

from __future__ import annotations

import gc
import math
import weakref
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scratch_axes import SLICE, grid_with
from torch import nn
from torch.utils.checkpoint import checkpoint

from bmt_core import BmtError, ConfigError
from bmt_core.run.runtime import current, is_initialized, rank, world_size
from bmt_params import DistributedModule, DistributedParameter, Locality
from bmt_params.modules.batch_parts import BatchParts
from bmt_testing import on_ranks, run_ranks
from bmtrain._inspect import (
    format_summary,
    inspect_model,
    inspect_tensor,
    record_tensor,
    summary_table,
)
from bmtrain._inspect.statistics import described, joined, moments, row

Summary = list[dict[str, Any]]
GRIDS = {
    "one": (1, {}),
    "dp 4": (4, {}),
    "dp x slices": (4, grid_with(SLICE)),
}
KEYS = ["name", "shape", "std", "mean", "max", "min", "grad_std", "grad_mean"]


def statistics_of(name: str, value: torch.Tensor, grad: torch.Tensor | None) -> dict[str, Any]:
    value = value.detach().double()
    return {
        "name": name,
        "shape": tuple(value.shape),
        "std": value.std().item(),
        "mean": value.mean().item(),
        "max": value.max().item(),
        "min": value.min().item(),
        "grad_std": 0.0 if grad is None else grad.double().std().item(),
        "grad_mean": 0.0 if grad is None else grad.double().mean().item(),
    }


def same(found: Summary, wanted: Summary, tolerance: float = 1e-9) -> None:
    assert [(item["name"], item["shape"]) for item in found] == [
        (item["name"], item["shape"]) for item in wanted
    ]
    for one, other in zip(found, wanted, strict=True):
        assert list(one) == KEYS and all(type(one[key]) is float for key in KEYS[2:])
        for key in KEYS[2:]:
            assert one[key] == pytest.approx(
                other[key], rel=tolerance, abs=tolerance, nan_ok=True
            ), (one["name"], key)


NUMBERS = st.floats(-1e6, 1e6, width=32)


@pytest.mark.filterwarnings("ignore:std")  # of one element
@given(st.lists(st.lists(NUMBERS, max_size=5), min_size=1, max_size=5), st.booleans())
def test_parts_of_any_sizes_have_the_statistics_of_the_whole(
    parts: list[list[float]], has_gradient: bool
) -> None:
    tensors = [torch.tensor(part, dtype=torch.float64) for part in parts]
    whole = torch.cat(tensors)
    rows = torch.stack([row(moments(t), t * 2 if has_gradient else None) for t in tensors])
    found = described(joined(rows))
    if not len(whole):
        assert all(math.isnan(found[key]) for key in ("std", "mean", "max", "min"))
        return
    wanted = statistics_of("", whole, whole * 2 if has_gradient else None)
    scale = float(whole.abs().max())
    assert {
        key: pytest.approx(wanted[key], rel=1e-9, abs=1e-9 * scale, nan_ok=True) for key in found
    } == found


@pytest.mark.parametrize("special", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_shows_as_in_torch(special: float) -> None:
    tensors = [torch.tensor([1.0, 2.0]), torch.tensor([special]), torch.tensor([])]
    whole = torch.cat(tensors)
    found = described(joined(torch.stack([row(moments(t), None) for t in tensors])))
    wanted = statistics_of("", whole, None)
    assert found == {key: pytest.approx(wanted[key], nan_ok=True) for key in found}


def test_a_small_spread_far_from_zero_is_not_lost() -> None:
    x = (
        1e8
        + torch.randn(1000, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 1e-3
    )
    found = described(joined(torch.stack([row(moments(part), None) for part in x.split(7)])))
    assert found["std"] == pytest.approx(x.std().item(), rel=1e-6)


def test_pieces_that_are_converted_one_by_one_make_no_difference(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x = torch.randn(3, 50).bfloat16().t()
    whole = moments(x)
    monkeypatch.setattr("bmtrain._inspect.statistics._PIECE", 7)
    torch.testing.assert_close(moments(x), whole)


class Net(DistributedModule):
    """Parameters of every kind: sharded, cut along each dim, replicated in both ways, of half type,
    frozen, plain, tied.
    """

    def __init__(self) -> None:
        super().__init__()
        make: Any = (
            DistributedParameter
            if is_initialized()
            else lambda data, locality=(): nn.Parameter(data)
        )
        index = current().topology.axis_rank("slice") if is_initialized() else 0
        size = current().topology.axis_size("slice") if is_initialized() else 1
        data = torch.randn(4, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        self.rows = make(data.chunk(size, 0)[index], locality=[Locality("slice", split_dim=0)])
        self.columns = make(data.chunk(size, 1)[index], locality=[Locality("slice", split_dim=1)])
        self.share = make(data[0], locality=[Locality("slice", gradients="share")])
        self.whole = make(data[1], locality=[Locality("slice", gradients="whole")])
        self.low = make(data.bfloat16())
        self.scalar_like = make(data[:1, 0])
        self.inner = nn.Linear(3, 2, dtype=torch.float64)
        nn.init.constant_(self.inner.weight, 0.25)
        self.tied = make(data[2])
        self.again = self._parameters["tied"]


def with_gradients() -> Net:
    net = Net()
    for number, (name, parameter) in enumerate(net.named_parameters()):
        if name not in ("low", "inner.bias"):
            parameter.grad = parameter.detach() * number + 1
    return net


def model_summaries() -> list[Summary]:
    torch.manual_seed(0)
    net = with_gradients()
    return [
        inspect_model(net, "*"),
        inspect_model(net, "inner.[vw]*"),
        inspect_model(net.inner, "a.*", "a."),
    ]


@pytest.mark.filterwarnings("ignore:std")
@pytest.mark.parametrize(("ranks", "init"), GRIDS.values(), ids=GRIDS)
def test_a_model_has_the_statistics_of_whole_parameters_on_every_grid(
    ranks: int, init: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    plain = with_gradients()
    wanted = [
        statistics_of(name, p, p.grad)
        for name, p in plain.named_parameters(remove_duplicate=False)
        if p is not None
    ]
    for everything, weight, prefixed in run_ranks(model_summaries, ranks, init=init):
        same(everything, wanted)
        assert [item["name"] for item in weight] == ["inner.weight"]
        assert [item["name"] for item in prefixed] == ["a.weight", "a.bias"]


def test_a_plain_model_needs_no_run() -> None:
    layer = nn.Linear(3, 2)
    same(
        inspect_model(layer, "*"), [statistics_of(n, p, None) for n, p in layer.named_parameters()]
    )
    assert inspect_model(layer, "nothing") == []


@on_ranks(2)
def test_a_parameter_without_values_on_one_rank_is_an_error_on_all() -> None:
    net = Net()
    if rank() == 1:
        net.inner.weight = nn.Parameter(torch.empty(2, 3, device="meta"))
    with pytest.raises(ConfigError, match=r"inner\.weight has no values"):
        inspect_model(net, "*")
    assert len(inspect_model(net, "rows")) == 1


@on_ranks(2)
def test_collectives_do_not_grow_with_the_number_of_parameters() -> None:
    counts = []
    for length in (1, 20):
        layers = nn.ParameterList([DistributedParameter(torch.ones(3)) for _ in range(length)])
        with counting_operations() as count:
            inspect_model(layers, "*")
        counts.append(count())
    assert counts[0] == counts[1] <= 3  # the section's two, and one for all numbers


class counting_operations:
    """Counts the collectives of the group of all ranks."""

    def __enter__(self) -> Any:
        self.count = 0
        group = current().world
        self.methods = {
            name: getattr(group, name) for name in ("all_gather", "all_reduce", "broadcast")
        }
        for name, method in self.methods.items():
            setattr(group, name, self.wrapped(method))
        return lambda: self.count

    def wrapped(self, method: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            return method(*args, **kwargs)

        return call

    def __exit__(self, *_: object) -> None:
        for name in self.methods:
            delattr(current().world, name)


def rows(count: int) -> torch.Tensor:
    x = torch.randn(count, 3, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    return x * torch.arange(1, count + 1)[:, None]


def recorded_step(own: slice, passes: int = 2) -> tuple[Summary, Summary]:
    x, weight = rows(8)[own], torch.ones(3, 2, dtype=torch.float64, requires_grad=True)
    with inspect_tensor() as inspector:
        record_tensor(x, "input")
        for layer in range(2):
            x = x @ weight @ weight.t()
            record_tensor(x, "hidden")
            record_tensor(x, "hidden", group=f"layer{layer}")
            record_tensor(x, "no gradient", requires_grad=False)
        loss = x.pow(2).sum()
        for _ in range(passes):
            loss.backward(retain_graph=True)
    return inspector.get_summary(), inspector.summary


def expected_step(passes: int = 2) -> Summary:
    x, weight = rows(8), torch.ones(3, 2, dtype=torch.float64, requires_grad=True)
    tensors = [("0.input", x, False)]
    for layer in range(2):
        x = x @ weight @ weight.t()
        x.retain_grad()
        tensors += [
            (f"{layer}.hidden", x, True),
            (f"layer{layer}.0.hidden", x, True),
            (f"{layer}.no gradient", x, False),
        ]
    for _ in range(passes):
        x.pow(2).sum().backward(retain_graph=True)
    return [statistics_of(name, t, t.grad if follows else None) for name, t, follows in tensors]


def own_rows() -> dict[int, tuple[Summary, Summary]]:
    index, size = current().topology.data_rank, current().topology.data_size
    own = slice(index * 8 // size, (index + 1) * 8 // size)
    return {passes: recorded_step(own, passes) for passes in (0, 1, 3)}


@pytest.mark.parametrize(("ranks", "init"), GRIDS.values(), ids=GRIDS)
def test_recorded_tensors_have_the_statistics_of_the_global_batch(
    ranks: int, init: dict[str, Any]
) -> None:
    """Ranks along ``slice`` see the same data, and count once."""
    for of_rank in run_ranks(own_rows, ranks, init=init):
        for passes, (found, local) in of_rank.items():
            same(found, expected_step(passes))
            assert [item["summary_name"] for item in local] == [item["name"] for item in found]


def test_no_run_is_needed() -> None:
    found, local = recorded_step(slice(None))
    same(found, expected_step())
    assert all(item["tensor"] is not None for item in local)
    names = [(item["name"], item["group"]) for item in local[:3]]
    assert names == [("input", None), ("hidden", None), ("hidden", "layer0")]
    same(
        [{key: item["summary_name" if key == "name" else key] for key in KEYS} for item in local],
        expected_step(),
    )


def cut_along_slices() -> Summary:
    """Each rank along ``slice`` has its rows, and of what all have whole, a share of
    the gradient.
    """
    topology = current().topology
    index, size = topology.axis_rank("slice"), topology.axis_size("slice")
    x = rows(8).chunk(topology.data_size)[topology.data_rank].requires_grad_()
    with inspect_tensor() as inspector:
        whole = x * 1
        record_tensor(whole, "whole")
        part = whole.chunk(size)[index] * 3
        record_tensor(part, "part")
        part.pow(2).sum().backward()
    return inspector.get_summary()


def test_parts_along_an_axis_of_the_same_data_all_count_and_shares_of_gradients_are_summed() -> (
    None
):
    whole = rows(8)
    wanted = [
        statistics_of("0.whole", whole, whole * 18),
        statistics_of("0.part", whole * 3, whole * 6),
    ]
    for found in run_ranks(cut_along_slices, 4, init=grid_with(SLICE)):
        same(found, wanted)


@on_ranks(2)
def test_ranks_may_have_other_shapes_and_only_some_a_gradient() -> None:
    x = torch.ones(rank() + 1, rank() + 2, requires_grad=True)
    with inspect_tensor() as inspector:
        record_tensor(x, "x")
        record_tensor(x.sum(), "loss")
        record_tensor(x[:0], "empty")
        if rank() == 0:
            (x * 2).sum().backward()
    of_x, loss, empty = inspector.get_summary()
    gradient = torch.tensor([2.0] * 2 + [0.0] * 6)
    assert of_x["shape"] == (3, -1) and of_x["mean"] == 1 and of_x["std"] == 0
    assert (of_x["grad_mean"], of_x["grad_std"]) == pytest.approx((0.5, gradient.std().item()))
    assert loss["shape"] == (2,) and (loss["min"], loss["max"], loss["mean"]) == (2, 6, 4)
    assert empty["shape"] == (0, -1) and math.isnan(empty["mean"]) and math.isnan(empty["max"])


@on_ranks(2)
def test_ranks_that_record_other_tensors_are_told_so() -> None:
    with inspect_tensor() as inspector:
        record_tensor(torch.ones(1), "x" if rank() == 0 else "y")
    unlike = r"different tensors: rank 0 0\.x; rank 1 0\.y\. Call record_tensor\(\) alike"
    with pytest.raises(BmtError, match=unlike):
        inspector.get_summary()


class Recorder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.layer(x))
        record_tensor(x, "x")
        return x * 2


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpointed_tensor_is_recorded_once(use_reentrant: bool) -> None:
    module, x = Recorder(), torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    with inspect_tensor() as inspector:
        checkpoint(module, x, use_reentrant=use_reentrant).sum().backward()
    (found,) = inspector.get_summary()
    assert found["grad_mean"] == (0 if use_reentrant else 2)
    # Absolute, because values between -1 and 1 may have a mean near 0.
    assert found["mean"] == pytest.approx(torch.tanh(module.layer(x)).mean().item(), abs=1e-12)


def test_what_happens_in_place_afterwards_changes_nothing() -> None:
    x = torch.ones(3, requires_grad=True) * 1
    with inspect_tensor() as inspector:
        record_tensor(x, "x")
        x.mul_(5)
        x.sum().backward()
    (found,) = inspector.get_summary()
    assert (found["mean"], found["grad_mean"]) == (1, 5)


def test_tensors_are_found_by_name_group_and_number_and_are_part_of_the_graph() -> None:
    leaf = torch.ones(2, requires_grad=True)
    with inspect_tensor() as inspector:
        for factor in (1.0, 2.0):
            record_tensor(leaf * factor, "x")
        record_tensor(leaf * 3, "x", group="g")
    found = [
        inspector.get_tensor("x"),
        inspector.get_tensor("x", index=1),
        inspector.get_tensor("x", "g", 0),
    ]
    assert [tensor is not None and float(tensor[0].detach()) for tensor in found] == [1, 2, 3]
    assert (
        inspector.get_tensor("y")
        is inspector.get_tensor("x", "h")
        is inspector.get_tensor("x", index=2)
        is None
    )
    assert found[2] is not None
    found[2].sum().backward()
    assert leaf.grad is not None and leaf.grad.tolist() == [3, 3]
    assert [item["grad_mean"] for item in inspector.get_summary()] == [0, 0, 1]


def test_nothing_is_recorded_outside_and_each_of_nested_contexts_records_what_is_inside_it() -> (
    None
):
    x = torch.ones(1)
    record_tensor(x, "before")
    with inspect_tensor() as outer:
        record_tensor(x, "a")
        with pytest.raises(RuntimeError, match="stop"), inspect_tensor() as inner:
            record_tensor(x, "b")
            raise RuntimeError("stop")
        record_tensor(x, "c")
    record_tensor(x, "after")
    assert [item["name"] for item in outer.get_summary()] == ["0.a", "0.b", "0.c"]
    assert [item["name"] for item in inner.get_summary()] == ["0.b"]


def test_without_a_graph_values_are_recorded() -> None:
    for mode in (torch.no_grad(), torch.inference_mode()):
        with inspect_tensor() as inspector, mode:
            record_tensor(torch.arange(4), "ids")
        (found,) = inspector.get_summary()
        assert (found["mean"], found["grad_mean"]) == (1.5, 0)


def test_an_inspector_that_is_gone_keeps_nothing_alive_and_leaves_no_hook() -> None:
    gc.disable()  # by reference counts alone
    try:
        leaf = torch.ones(2, requires_grad=True)
        with inspect_tensor() as inspector:
            x = leaf * 2
            record_tensor(leaf, "leaf")
            record_tensor(x, "x")
            x.sum().backward()
        seen = weakref.ref(x)
        del x
        assert seen() is not None and leaf._backward_hooks
        del inspector
        assert seen() is None and not leaf._backward_hooks
    finally:
        gc.enable()


@pytest.mark.parametrize("value", [nn.Parameter(torch.ones(1)), 3.0])
def test_what_is_no_activation_is_refused(value: Any) -> None:
    with inspect_tensor(), pytest.raises(TypeError, match=r"'x' is a (Parameter|float)"):
        record_tensor(value, "x")
    with inspect_tensor(), pytest.raises(TypeError, match=r"torch.complex64 has no minimum"):
        record_tensor(torch.ones(1, dtype=torch.complex64), "x")


@on_ranks(2)
def test_micro_batches_are_joined_and_parts_are_in_the_order_of_the_model() -> None:
    """Two calls of a model of two parts, each on another rank, in two micro-batches, between code
    that all ranks run.
    """
    with inspect_tensor() as inspector:
        record_tensor(torch.zeros(1), "x")
        for call in range(2):
            parts = BatchParts()
            for micro_batch in range(2):
                with parts.forward(rank(), micro_batch):
                    record_tensor(torch.full((2, 3), 10.0 * call + 2 * rank() + micro_batch), "x")
        record_tensor(torch.ones(1), "x")
    own = inspector.get_tensor("x", index=1)
    assert (
        own is not None and own.tolist() == [[2.0 * rank()] * 3] * 2 + [[2.0 * rank() + 1] * 3] * 2
    )
    found = inspector.get_summary()
    assert [item["name"] for item in found] == [f"{i}.x" for i in range(6)]
    assert [item["shape"] for item in found] == [(2,), *[(4, 3)] * 4, (2,)]
    assert [item["mean"] for item in found] == [0, 0.5, 2.5, 10.5, 12.5, 1]


def test_micro_batches_that_record_other_tensors_are_told_so() -> None:
    with (
        inspect_tensor(),
        pytest.raises(ValueError, match="Micro-batch 1 records 'y' of group None where"),
    ):
        parts = BatchParts()
        for micro_batch, name in enumerate("xy"):
            with parts.forward(0, micro_batch):
                record_tensor(torch.ones(1), name)


def test_text_is_laid_out_as_bmtrain_does() -> None:
    item = dict.fromkeys(KEYS, 1.0) | {
        "name": "layer.weight",
        "shape": (1000000, 1000000, 1000),
        "max": 123456.789,
    }
    assert format_summary([item, {"name": "x"}]).split("\n") == [
        (
            " name            shape               max       min       std       mean"
            "      grad_std  grad_mean"
        ),
        (
            " layer.weight    (1000000, 1000000,  123456.78 1.0000    1.0000    1.0000"
            "    1.0000    1.0000   "
        ),
        " x" + " " * (14 + 20 + 60),
    ]
    assert format_summary([]).startswith(" name   " + " shape")


def test_a_table_cuts_nothing() -> None:
    table = summary_table(inspect_model(nn.Linear(3, 2), "*"), "parameters")
    assert table.row_count == 2 and [column.header for column in table.columns][:2] == [
        "name",
        "shape",
    ]
    assert list(table.columns[0].cells) == ["weight", "bias"] and world_size() == 1
