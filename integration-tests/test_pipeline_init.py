"""Layers of a pipeline that are made on the meta device, or that have an ``init_method``: values of
one process, for every grid.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from pipeline_trainings import outcome
from torch import nn

from bmt_core.run.runtime import current
from bmt_params import init_parameters
from bmt_pipeline import PipelineTransformerBlockList
from bmt_testing import on_ranks, run_ranks
from bmt_zero import BMTrainModelWrapper

WIDTH, LAYERS = 4, 9


class Layer(nn.Module):
    """Layers that initialise themselves, a parameter of its own, and what both know of
    one another.
    """

    made: list[int] = []  # the numbers of those that this process has constructed

    def __init__(self, number: int) -> None:
        super().__init__()
        Layer.made.append(number)
        self.up, self.down = nn.Linear(WIDTH, 5), nn.Linear(5, WIDTH, bias=False)
        self.gain = nn.Parameter(torch.empty(WIDTH))
        self.register_buffer("noise", torch.empty(3))

    def reset_parameters(self) -> None:
        nn.init.normal_(self.gain)
        nn.init.normal_(self.noise)
        with torch.no_grad():
            self.down.weight.mul_(0.5)


class Model(nn.Module):
    def __init__(self, make_list: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, WIDTH)
        self.layers: Any = make_list()
        self.head = nn.Linear(WIDTH, 7)


def plain() -> dict[str, torch.Tensor]:
    with torch.device("meta"):
        model = Model(lambda: nn.ModuleList([Layer(number) for number in range(LAYERS)]))
    model.to_empty(device="cpu")
    torch.manual_seed(3)
    model.apply(
        lambda module: module.reset_parameters() if hasattr(module, "reset_parameters") else None
    )  # type: ignore[operator]
    return model.state_dict()


def on_meta(kind: str, **options: Any) -> tuple[dict[str, torch.Tensor], list[int], int]:
    """This rank's part of the model, which layers it constructed, and a number that is
    drawn afterwards.
    """
    Layer.made.clear()

    def make_list() -> nn.Module:
        number = iter(range(LAYERS))
        members = (
            [lambda n=n: Layer(n) for n in number]
            if kind == "factories"
            else [Layer(n) for n in number]
        )
        return PipelineTransformerBlockList(members, **options)

    with torch.device("meta"):
        model = Model(make_list)
    BMTrainModelWrapper(model, init=False)
    torch.manual_seed(3)
    init_parameters(model)
    return dict(model.state_dict()), list(Layer.made), int(torch.randint(2**31, ()))


def all_on_meta() -> list[Any]:
    forms: list[tuple[str, dict[str, Any]]] = [
        ("factories", {}),
        ("factories", {"chunks": 2, "placement": "v"}),
        ("modules", {"chunks": 2}),
    ]
    return [on_meta(kind, **options) for kind, options in forms]


@pytest.mark.parametrize(("ranks", "stages"), [(1, 1), (4, 2)])
def test_layers_of_the_meta_device_get_the_values_of_one_process(ranks: int, stages: int) -> None:
    wanted = plain()
    after = int(torch.randint(2**31, ()))  # plain() has seeded and drawn
    results = run_ranks(all_on_meta, ranks, init={"pipe_size": stages, "timeout": 30})
    for forms in zip(*results, strict=True):
        seen: set[str] = set()
        for state, made, number in forms:
            assert number == after
            own = {int(name.split(".")[1]) for name in state if name.startswith("layers.")}
            assert set(made) == own or len(made) == LAYERS  # of ready modules all are made
            for name, value in state.items():
                assert torch.equal(value, wanted[name]), name
            seen.update(state)
        assert seen == wanted.keys()
    assert ranks == 1 or len(results[0][0][1]) < LAYERS


class Drawing(Model):
    """Initialises its layers itself."""

    def reset_parameters(self) -> None:
        for layer in self.layers:
            nn.init.normal_(layer.gain)


class Broken(Layer):
    def reset_parameters(self) -> None:
        raise ValueError("no luck")


def error_of(kind: type[Model], layer: type[Layer], seed: int = 0) -> str:
    with torch.device("meta"):
        model = kind(
            lambda: PipelineTransformerBlockList(
                [lambda: Layer(0), lambda: Layer(1), lambda: layer(2)]
            )
        )
    torch.manual_seed(seed)
    return str(outcome(lambda: BMTrainModelWrapper(model)))


@on_ranks(2, init={"pipe_size": 2, "timeout": 30})
def test_what_cannot_be_initialised_raises_on_all_ranks() -> None:
    assert error_of(Drawing, Layer).startswith(
        "ConfigError: The initialisation of the model, which all ranks have, drew other random"
    )
    of_others = "RemoteError: Rank 1 failed in the initialisation of its layers: "
    broken = ("" if current().rank == 1 else of_others) + "ValueError: no luck"
    assert error_of(Model, Broken) == broken
    seeded = error_of(Model, Layer, seed=current().rank)
    assert "Ranks (0, 1) would initialise a model with different random numbers" in seeded
