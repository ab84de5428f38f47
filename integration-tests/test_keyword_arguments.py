"""A keyword argument that a function does not have: the error names the one that is meant."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

import bmtrain as bmt

Manager = bmt.optim.OptimManager
ADD = "Hand it to add_optimizer(optimizer, lr_scheduler)."
OF_MANAGER = (
    "Hand it to an OptimManager: manager.add_optimizer(optimizer, lr_scheduler); and pass the"
    " manager."
)
CALLS: list[tuple[Callable[..., object], str, str]] = [
    (bmt.init_distributed, "tensor_parallel_size", "Did you mean tp_size?"),
    (bmt.init_distributed, "zero_stage", "Did you mean zero_level?"),
    (bmt.init_distributed, "grad_reduce_dtype", "Did you mean reduce_dtype?"),
    (bmt.init_distributed, "world_size", "The launcher says how many ranks there are: torchrun"),
    (bmt.Block, "checkpoint", "Did you mean use_checkpoint?"),
    (bmt.CheckpointBlock, "gradient_checkpointing", "Did you mean use_checkpoint?"),
    (bmt.TransformerBlockList, "use_checkpoint", "Give it to each Block: TransformerBlockList(["),
    (bmt.PipelineTransformerBlockList, "zero_level", "Make each layer a Block, with mode="),
    (bmt.BMTrainModelWrapper, "use_checkpoint", "Make the layers Blocks before you wrap the"),
    (Manager, "optimizer", ADD),
    (Manager, "loss_scaling", "Did you mean loss_scale?"),
    (Manager().add_optimizer, "scheduler", "Did you mean lr_scheduler?"),
    (bmt.save, "filename", "Did you mean file_name?"),
    (bmt.load, "map_location", "Every rank loads its parts to the device of the model."),
    (bmt.save_checkpoint, "optimizer", OF_MANAGER),
    (bmt.load_checkpoint, "optim_manager", "Did you mean manager?"),
]


@pytest.mark.parametrize(("function", "given", "hint"), CALLS)
def test_a_wrong_argument_names_the_near_one_and_all_others(
    function: Callable[..., Any], given: str, hint: str
) -> None:
    needed = {
        name: nn.ReLU()
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind == parameter.POSITIONAL_OR_KEYWORD
    }
    with pytest.raises(TypeError) as caught:
        function(**needed, **{given: 2})
    said, _, known = str(caught.value).partition(" Its arguments: ")
    assert f"() got an unexpected keyword argument {given!r}. {hint}" in said
    assert {*needed} <= {*known.removesuffix(".").split(", ")}


def test_an_argument_that_is_near_to_none_has_no_guess() -> None:
    with pytest.raises(
        TypeError, match=r"argument 'xyz'\. Its arguments: model, file_name, strict"
    ):
        bmt.load(nn.ReLU(), "model.pt", xyz=1)  # type: ignore[call-arg]


def test_a_layer_stays_as_it_is_when_a_block_has_a_wrong_argument() -> None:
    layer = nn.Linear(2, 2)
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        bmt.Block(layer, checkpoint=False)
    assert type(layer) is nn.Linear


def test_a_layer_list_of_the_programs_own_takes_what_it_says() -> None:
    class Mine(bmt.TransformerBlockList):
        def __init__(self, size: int) -> None:
            super().__init__([])
            self.size = size

    assert Mine(size=3).size == 3
    with pytest.raises(TypeError, match="unexpected keyword argument 'num_hidden'"):
        Mine(num_hidden=1)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("function", "said_above"),
    [
        (bmt.init_distributed, set()),
        (bmt.Block, {"inner_module"}),
        (bmt.TransformerBlockList, set()),
        (bmt.PipelineTransformerBlockList, set()),
        (bmt.BMTrainModelWrapper, {"model"}),
        (Manager, set()),
    ],
)
def test_each_argument_has_a_line_of_its_own_in_the_reference(
    function: Any, said_above: set[str]
) -> None:
    called = function.__init__ if isinstance(function, type) else function
    arguments = inspect.signature(called).parameters.keys() - {"self"} - said_above
    items = re.findall(r"^- (``\w+``(?:, ``\w+``)*): ", inspect.getdoc(function) or "", re.M)
    named = [name for item in items for name in re.findall(r"\w+", item)]
    assert sorted(named) == sorted(arguments)
