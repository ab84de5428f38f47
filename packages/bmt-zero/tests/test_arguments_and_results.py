"""What a Block is called with and what it returns: every form passes through, with its gradients,
and lives on.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections import OrderedDict, namedtuple
from typing import Any

import torch
from torch import nn
from zero_models import grads_of, of_all_ranks

from bmt_core.run.runtime import rank
from bmt_testing import on_ranks
from bmt_zero import Block
from cells import cells

Pair = namedtuple("Pair", "left right")


@dataclasses.dataclass
class Packed:
    hidden: torch.Tensor
    note: str = "kept"


class Record(OrderedDict[str, Any]):
    """A dict with attributes, as model libraries return it."""


class Greedy(nn.Module):
    """Takes every form of argument, and has one named like an option of torch's checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)

    def forward(
        self,
        x: torch.Tensor,
        scale: float = 1.0,
        *rest: Any,
        shift: Any = None,
        use_reentrant: str = "no",
        **more: Any,
    ) -> Any:
        y = self.linear(x) * scale
        for item in rest:
            y = y + item["inner"][0]
        if shift is not None:
            y = y + shift.hidden
        return (
            y,
            use_reentrant,
            sorted(more),
            Packed(y * 2),
            Record(out=y * 3),
            Pair([y], {"deep": (y * 4,)}),
            None,
        )


@on_ranks(2)
@cells("use_checkpoint", [False, True])
def test_every_argument_and_result_form_passes_through(use_checkpoint: bool) -> None:
    plain, block = Greedy(), Block(Greedy(), use_checkpoint=use_checkpoint)
    results = []
    for module in (plain, block):
        x = torch.arange(8.0).view(2, 4).requires_grad_()
        inner = torch.ones(4, requires_grad=True)
        shift = Packed(torch.full((4,), 2.0, requires_grad=True))
        y, text, more, packed, record, pair, nothing = module(
            x,
            0.5,
            {"inner": [inner]},
            {"inner": (inner,)},
            shift=shift,
            use_reentrant="yes",
            mask=1,
            zero=0,
        )
        assert (text, more, nothing) == ("yes", ["mask", "zero"], None)
        assert type(packed) is Packed and packed.note == "kept"
        assert type(record) is Record and type(pair) is Pair
        parts = (y, packed.hidden, record["out"], pair.left[0], pair.right["deep"][0])
        sum(part.sum() for part in parts).backward()
        results.append((y.detach(), x.grad, inner.grad, shift.hidden.grad))
    torch.testing.assert_close(results[1], results[0])
    torch.testing.assert_close(grads_of(block), grads_of(plain, times=2))


class Listing(nn.Linear):
    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:  # type: ignore[override]
        return [super().forward(x), x]


@on_ranks(2)
def test_a_list_that_a_block_returns_stays_a_list_which_is_said_once() -> None:
    blocks = [Block(Listing(3, 3)), Block(Listing(3, 3))]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert [type(block(torch.ones(2, 3))) for block in blocks] == [list, list]
    said = [str(warning.message) for warning in caught]
    assert len(said) == (rank() == 0) and all(
        "BMTrain's Block returned a tuple" in text for text in said
    )


class WithSummary(nn.Linear):
    def forward(self, x: torch.Tensor) -> Any:
        out = super().forward(x)
        return out, out.detach().mean()


@on_ranks(2)
@cells("use_checkpoint", [False, True])
def test_a_result_that_forward_detached_stays_so(use_checkpoint: bool) -> None:
    out, summary = Block(WithSummary(4, 4), use_checkpoint)(torch.ones(2, 4))
    assert out.requires_grad and not summary.requires_grad


class KeepsCache(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.prefix = nn.Parameter(torch.arange(6.0).view(2, 3))

    def forward(self, x: torch.Tensor) -> Any:
        return x + self.prefix.sum(), {"cache": self.prefix[:1], "again": self.prefix}


@on_ranks(2)
@cells("level", [2, 3])
def test_outputs_that_are_views_of_parameters_outlive_the_buffer(level: int) -> None:
    block = Block(KeepsCache(), zero_level=level)
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            _, kept = block(torch.zeros(1))
        assert kept["cache"].tolist() == [[0.0, 1.0, 2.0]]
        assert kept["again"].tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
        assert kept["again"].requires_grad == grad


class Drops(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(x * self.weight, 0.5, self.training)


@on_ranks(2)
@cells("use_checkpoint", [False, True])
def test_dropout_differs_between_data_ranks_and_not_in_recomputation(use_checkpoint: bool) -> None:
    block = Block(Drops(), use_checkpoint=use_checkpoint)
    x = torch.ones(64, requires_grad=True)
    output = block(x)
    drawn = torch.rand(())
    output.sum().backward()
    assert x.grad is not None and torch.equal(output, x.grad)
    (mask, shared), (other_mask, other_shared) = of_all_ranks((output.tolist(), float(drawn)))
    assert mask != other_mask
    assert shared == other_shared  # the user's own draws stay alike on all ranks
