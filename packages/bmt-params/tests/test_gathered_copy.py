"""Writes to parameters that code reads outside of a forward: in constructors they take effect,
later they raise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from scratch_axes import SLICE, grid_with
from torch import nn

from bmt_core import ConfigError
from bmt_params import DistributedModule, DistributedParameter, Locality
from bmt_testing import on_ranks, run_ranks

ROWS = torch.arange(21.0).view(7, 3)


class Table(DistributedModule):
    """As models are written by hand: the constructor fills a part of its parameter,
    by ``fill(self)``.
    """

    def __init__(self, fill: Callable[[Any], Any], **options: Any) -> None:
        super().__init__()
        self.weight = DistributedParameter(ROWS.clone(), **options)
        fill(self)


class PlainTable(nn.Module):
    def __init__(self, fill: Callable[[Any], Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(ROWS.clone())
        fill(self)


def write_row(table: Any) -> None:
    with torch.no_grad():
        table.weight[2] = 0


def write_rows_and_columns(table: Any) -> None:
    with torch.no_grad():
        weight = table.weight
        weight[1:3, 2] += 4
        weight[-1].copy_(torch.ones(3))
        weight.t()[0].mul_(2)


def add_in_place(table: Any) -> None:
    with torch.no_grad():
        table.weight += 1
        table.weight[1] *= 3


def split(table: Any) -> None:
    for number, part in enumerate(table.weight.data.split(3)):
        part.add_(10 * number)


def assign_data(table: Any) -> None:
    table.weight.data = torch.linspace(0, 1, 21).view(7, 3)
    table.weight.data *= 3
    table.weight.data[1] = 2.0


FILLS: list[Callable[[Any], Any]] = [
    lambda table: table.weight.data[2].zero_(),
    lambda table: [table.weight.data[row].fill_(row) for row in range(5)],
    lambda table: table.weight.data[1].__setitem__(slice(1, None), 5.0),
    write_row,
    write_rows_and_columns,
    add_in_place,
    split,
    lambda table: nn.init.constant_(table.weight[4], 3.0),
    lambda table: nn.init.xavier_uniform_(table.weight),
    lambda table: table.weight.detach()[3].normal_(),
    lambda table: torch._foreach_zero_(list(table.weight.data[::3])),
    lambda table: torch.add(ROWS, 1, out=table.weight.data),
    assign_data,
]


def filled(kind: type[nn.Module]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the values and the gradient of a table for each way to fill it."""
    found = []
    for fill in FILLS:
        torch.manual_seed(5)
        table = kind(fill)
        (table.weight.square().sum() / 2).backward()
        parameter = next(table.parameters())
        grad = parameter.grad
        if isinstance(parameter, DistributedParameter):
            grad = parameter.gather_like(parameter.grad) / parameter.shard_group.size
        found.append((dict(table.state_dict())["weight"].clone(), grad))
    return found


@on_ranks(4)
def test_what_a_constructor_writes_to_a_part_of_a_parameter_takes_effect() -> None:
    torch.testing.assert_close(filled(Table), filled(PlainTable))


def error_of(call: Callable[[], Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        call()
    return str(caught.value)


def refused() -> dict[str, str]:
    """What is said of writes that would be lost, or would undo another one. None of them
    changes anything.
    """
    table = Table(lambda table: None)
    weight = table.weight
    other = table.weight
    weight.data[0].zero_()
    weight.data[1].zero_()  # the copy that was written to is up to date
    found = {"outdated": error_of(lambda: other.data[1].fill_(2.0))}
    found["recorded"] = error_of(lambda: table.weight.__setitem__(0, 1.0))
    found["recorded fill"] = error_of(lambda: table.weight.mul_(2.0))
    for data in (torch.ones(3, 7), torch.ones(7, 3).half(), Table(lambda table: None).weight):
        assert "would be lost" in error_of(lambda data=data: setattr(table.weight, "data", data))
    found["frozen"] = error_of(lambda: table.weight.requires_grad_(False))
    parameter: Any = table.get_parameter("weight")
    assert parameter.is_untrained
    table.weight.sum().backward()
    parameter.grad = None
    assert not parameter.is_untrained
    found["trained"] = error_of(lambda: table.weight.data[0].fill_(2.0))
    expected = ROWS.clone()
    expected[:2] = 0
    torch.testing.assert_close(dict(table.state_dict())["weight"], expected)
    return found


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_write_that_would_be_lost_or_undo_another_raises(world_size: int) -> None:
    for found in run_ranks(refused, world_size):
        assert "of shape (7, 3) that is out of date" in found["outdated"]
        assert (
            "while autograd records it" in found["recorded"]
            and "torch.no_grad()" in found["recorded fill"]
        )
        assert "set requires_grad there" in found["frozen"]
        assert (
            "would be lost" in found["trained"] and "whole_parameters(module)" in found["trained"]
        )


def other_objects() -> list[str]:
    """What shares the memory of a copy, and is no tensor; and what is assigned, and is not all of
    the copy.
    """
    numpy = pytest.importorskip("numpy")
    table, found = Table(lambda table: None), []
    for array in (table.weight.data.numpy(), numpy.asarray(table.weight.data[2:])):
        assert array.sum() > 0
        with pytest.raises(ValueError) as read_only:
            array[0] = 5.0
        found.append(str(read_only.value))
    for tensor in (table.weight[:7].t(), Table(lambda table: None).weight):
        with pytest.raises(TypeError) as assigned:
            table.weight = tensor
        found.append(str(assigned.value))
    return found


def test_arrays_of_copies_are_read_only_and_other_copies_cannot_be_assigned() -> None:
    pytest.importorskip("numpy")
    for *arrays, view, other in run_ranks(other_objects, 2):
        assert all("read-only" in text for text in arrays)
        assert view == other and view.startswith(
            "Table.weight is a parameter, and what was assigned to it is a tensor."
        )


def cut() -> tuple[str, list[float]]:
    """Write to a parameter of which each rank has a slice, and to one that is replicated along the
    same axis.
    """
    locality = [Locality("slice", split_dim=0)]
    text = error_of(lambda: Table(lambda table: table.weight.data[0].zero_(), locality=locality))
    whole = Table(FILLS[0], locality=[Locality("slice", gradients="whole")])
    return text, dict(whole.state_dict())["weight"][2].tolist()


def test_a_write_to_a_slice_raises_and_to_a_replicated_parameter_takes_effect() -> None:
    for text, row in run_ranks(cut, 4, init=grid_with(SLICE)):
        assert (
            "this rank's slice of Table.weight of shape (14, 3)" in text and "init_method" in text
        )
        assert row == [0.0, 0.0, 0.0]
