"""``Layout``: equal for values of one structure, refused for objects of which nobody knows what is
in them.
"""

from __future__ import annotations

import enum
import subprocess
import sys
from collections import OrderedDict
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from bmt_core.errors import ConfigError
from bmt_params.guards.equal_values import first_difference
from bmt_pipeline.payload import Layout


class Color(enum.Enum):
    RED = 1
    BLUE = 2


@dataclass
class Masks:
    mask: torch.Tensor | None
    scale: float = 1.0


class Pair(NamedTuple):
    first: Any
    second: Any


DIFFERENT: list[Any] = [
    *[
        None,
        0,
        1,
        True,
        0.5,
        1j,
        "1",
        b"1",
        ...,
        range(2),
        range(3),
        torch.float16,
        torch.device("cpu"),
        torch.strided,
    ],
    *[
        Color.RED,
        Color.BLUE,
        frozenset({"a", "b"}),
        {"a"},
        int,
        len,
        torch.nn.functional.relu,
        float("nan"),
        -0.0,
        0.0,
    ],
    *[
        (),
        [],
        {},
        (1,),
        [1],
        {1: 1},
        {"1": 1},
        {"1": 1, "2": 1},
        OrderedDict({"1": 1}),
        torch.Size([1]),
        (1, (1,)),
    ],
    *[Masks(None), Masks(None, 2.0), Pair(1, 2), Pair(1, 3), (1, 2)],
    *[
        torch.ones(2),
        torch.ones(3),
        torch.ones(2, 1),
        torch.ones(2).double(),
        torch.ones(2, requires_grad=True),
    ],
    *[Masks(torch.ones(2)), {"1": torch.ones(2)}, (torch.ones(2),), (torch.ones(2), None)],
]


def test_layouts_of_different_values_are_different_and_of_equal_ones_are_equal() -> None:
    layouts = [Layout(value) for value in DIFFERENT]
    assert len({layout.text for layout in layouts}) == len(DIFFERENT)
    for index, one in enumerate(layouts):
        assert [other == one for other in layouts] == [
            index == other for other in range(len(layouts))
        ]
    assert Layout((torch.zeros(2), 3)) == Layout((torch.ones(2), 3))


def test_a_layout_says_whether_there_are_values_besides_tensors() -> None:
    for value in [
        None,
        (),
        [None, torch.ones(2)],
        {"1": torch.ones(2)},
        Masks(torch.ones(2), None),
    ]:  # type: ignore[arg-type]
        assert not Layout(value).has_plain_values
    for value in [
        0,
        True,
        "1",
        [torch.ones(2), 1],
        {"1": (None, 2)},
        Masks(torch.ones(2)),
        Color.RED,
        len,
    ]:
        assert Layout(value).has_plain_values


PRINTED = (
    "from bmt_pipeline.payload import Layout; print(Layout([{'one', 'two', 'three'}, len,"
    " torch.nn.ReLU]).text)"
)


def test_a_text_is_the_same_in_another_process() -> None:
    texts = {
        subprocess.run(
            [sys.executable, "-c", f"import torch; {PRINTED}"],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(texts) == 1 and "torch.nn.modules.activation.ReLU" in texts.pop()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            {"a": (1, SimpleNamespace(t=torch.ones(2000)))},
            r"in x\['a'\]\[1\], a types.SimpleNamespace,",
        ),
        (Masks(nn.Linear(1, 1)), "in x.mask, a torch.nn.modules.linear.Linear,"),  # type: ignore[arg-type]
        ({SimpleNamespace: 1, object(): 2}, "in key of x, a object,"),
        ({1, object}, None),
        (frozenset({object()}), "in x, a frozenset,"),
        (torch.Generator(), "in x, a torch._C.Generator,"),
    ],
)
def test_an_object_with_unknown_contents_is_refused_by_its_type_and_place(
    value: Any, message: str | None
) -> None:
    if message is None:
        Layout(value, "x")
        return
    with pytest.raises(ConfigError, match=message):
        Layout(value, "x")


def test_the_first_difference_is_a_line_with_its_place() -> None:
    one, other = Layout(Pair([1, 2], torch.ones(2)), "x"), Layout(Pair([1, 3], torch.ones(3)), "x")
    assert first_difference(one.text, other.text) == ("x.first[1]: int 2", "x.first[1]: int 3")
    assert first_difference("a", "a\nb") == ("nothing more", "b")
