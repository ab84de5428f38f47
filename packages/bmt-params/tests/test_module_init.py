"""Modules made on the meta device initialise themselves, whole for a moment, as one
process would.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from counting import Counting
from scratch_axes import grid_with
from torch import nn

from bmt_core.errors import ConfigError
from bmt_core.run import runtime
from bmt_core.settings import MeshAxis
from bmt_params.init.parameter_init import ParameterInitializer, init_parameters
from bmt_params.locality import Locality
from bmt_params.modules.distributed_module import DistributedModule
from bmt_params.parameter import DistributedParameter
from bmt_params.uninitialized import has_values
from bmt_testing import on_ranks, run_ranks

Made = Callable[[torch.Tensor], nn.Parameter]
NORMAL = ParameterInitializer(nn.init.normal_, std=0.5)


def sharded(data: torch.Tensor, init_method: Any = None) -> nn.Parameter:
    return DistributedParameter(data, init_method=init_method)


def plain(data: torch.Tensor, init_method: Any = None) -> nn.Parameter:
    return nn.Parameter(data)


class Affine(DistributedModule):
    """Draws both, the bias through ``.data``, as older code does; counts in a buffer
    of integers.
    """

    def __init__(self, size: int, made: Made) -> None:
        super().__init__()
        self.weight = made(torch.empty(size, 3))
        self.bias = made(torch.empty(size))
        self.register_buffer("order", torch.empty(size, dtype=torch.int64), persistent=False)
        self.register_buffer("table", torch.empty(size), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.kaiming_uniform_(self.weight, a=2.0)
        self.bias.data.normal_(0.0, 0.1)
        self.order.copy_(torch.arange(len(self.order)))
        self.table = torch.linspace(0, 1, len(self.order))


class Model(DistributedModule):
    """A tie, a parameter of its own, and a last word on what is inside: one parameter anew, one
    changed where it is.
    """

    def __init__(self, made: Made = plain) -> None:
        super().__init__()
        self.first = Affine(5, made)
        self.second = Affine(5, made)
        self.second.weight = self.first._parameters["weight"]
        self.third = Affine(2, made)
        self.scale = made(torch.empty(()))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.uniform_(self.scale, 1.0, 2.0)
        nn.init.normal_(self.third.weight)
        with torch.no_grad():
            self.first.bias.mul_(3.0)


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {**model.state_dict(), **dict(model.named_buffers())}


@on_ranks(4)
def test_values_are_those_of_construction_in_one_process() -> None:
    torch.manual_seed(7)
    with torch.device("meta"):
        model = Model(sharded)
    assert all(isinstance(p, DistributedParameter) and not p.is_meta for p in model.parameters())
    init_parameters(model)
    found = state_of(model), torch.rand(3)
    torch.manual_seed(7)
    plain_model = Model()
    expected = state_of(plain_model), torch.rand(3)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


class Methods(DistributedModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight = DistributedParameter(torch.empty(5, 3), init_method=NORMAL)
        self.bias = DistributedParameter(torch.empty(3), init_method=nn.init.ones_)
        self.inner = nn.ModuleList([Affine(2, sharded)])


def methods(device: str) -> Any:
    torch.manual_seed(1)
    with torch.device(device):
        model = Methods()
        init_parameters(model)
    return {name: value for name, value in model.state_dict().items() if "inner" not in name}


def test_init_methods_draw_on_meta_what_they_draw_elsewhere() -> None:
    torch.manual_seed(1)
    expected = {"weight": nn.init.normal_(torch.empty(5, 3), std=0.5), "bias": torch.ones(3)}
    for result in run_ranks(methods, 4, "meta"):
        torch.testing.assert_close(result, expected, rtol=0, atol=0)


@on_ranks(2)
def test_only_what_is_touched_again_is_communicated() -> None:
    with torch.device("meta"):
        affine, model = Affine(5, sharded), Model(sharded)
    with Counting() as alone:
        init_parameters(affine)
    with Counting() as around:
        init_parameters(model)
    with Counting() as control:
        affine.weight
    assert control == ["all_gather"] and alone == []
    # third.weight and first.bias, which Model itself rewrites; the tied weight, drawn a second time
    # in vain
    assert around == ["all_reduce"] * 3


class Normed(DistributedModule):
    """Computes one parameter from another, which has values already: given before, or by
    its ``init_method``.
    """

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight
        self.gain = DistributedParameter(torch.empty(5))

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.gain.copy_(self.weight.norm(dim=1))


@on_ranks(4)
def test_initialisation_reads_what_has_values() -> None:
    torch.manual_seed(4)
    given = DistributedParameter(torch.randn(5, 3))
    with torch.device("meta"):
        models = [
            Normed(given),
            Normed(DistributedParameter(torch.empty(5, 3), init_method=NORMAL)),
        ]
    for model in models:
        init_parameters(model)
    torch.manual_seed(4)
    weights = [torch.randn(5, 3), nn.init.normal_(torch.empty(5, 3), std=0.5)]
    expected = [{"weight": weight, "gain": weight.norm(dim=1)} for weight in weights]
    found = [dict(model.state_dict()) for model in models]
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


class Older(DistributedModule):
    """Initialises what is inside by its own ``init_weights()``, which the constructor
    calls last.
    """

    def __init__(self, made: Made) -> None:
        super().__init__()
        self.inner = Affine(5, made)
        self.scale = made(torch.empty(3))
        self.init_weights()

    def init_weights(self, std: float = 0.02) -> None:
        nn.init.normal_(self.inner.weight, std=std)
        nn.init.constant_(self.scale, std)


@on_ranks(2)
def test_init_weights_without_arguments_has_the_last_word() -> None:
    torch.manual_seed(5)
    with torch.device("meta"):
        model = Older(sharded)
    init_parameters(model)
    found = state_of(model), torch.rand(2)
    torch.manual_seed(5)
    expected = state_of(Older(plain)), torch.rand(2)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


class Silent(DistributedModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight = DistributedParameter(torch.empty(4))
        self.part = DistributedParameter(torch.empty(4))
        self.register_buffer("mask", torch.ones(2, dtype=torch.bool))

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.part[:3] = 0  # a rank whose part is whole must fail with the others


class Gives(DistributedModule):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, Silent):
            nn.init.normal_(module.weight)
            nn.init.normal_(module.part)
            module.mask.fill_(True)


@on_ranks(4)
def test_what_nothing_initialises_is_named_on_every_rank() -> None:
    messages = []
    with torch.device("meta"):
        model = Gives(Silent()).inner
    for _ in range(2):
        with pytest.raises(ConfigError) as caught:
            init_parameters(model)
        messages.append(str(caught.value))
    with pytest.raises(ConfigError):
        model.weight
    for message in messages:
        assert message.startswith(
            "Parameters weight, part and buffers mask have no values after initialisation."
        )
        assert "reset_parameters()" in message and "init=" in message


def ways() -> list[Any]:
    found: list[Any] = []
    for way in ("around", "function"):
        torch.manual_seed(2)
        with torch.device("meta"):
            model = Gives(Silent())
        if way == "around":
            init_parameters(model)
        else:
            model = model.inner
            init_parameters(model, init=Gives(nn.Module())._init_weights)
        found.append({name.split(".")[-1]: value for name, value in state_of(model).items()})
    return found


def test_init_weights_of_a_module_around_and_a_function_initialise() -> None:
    torch.manual_seed(2)
    weight, part = torch.randn(4), torch.randn(4)
    for around, function in run_ranks(ways, 2):
        torch.testing.assert_close(
            around, {"weight": weight, "part": part, "mask": torch.ones(2, dtype=torch.bool)}
        )
        torch.testing.assert_close(function, around)


def biases_only(module: nn.Module) -> None:
    if isinstance(module, Affine):
        nn.init.constant_(module.bias, 9.0)


@on_ranks(2)
def test_what_a_function_leaves_is_left_to_the_module() -> None:
    torch.manual_seed(3)
    with torch.device("meta"):
        model = Affine(5, sharded)
    init_parameters(model, init=biases_only)
    torch.manual_seed(3)
    expected = state_of(Affine(5, plain)) | {"bias": torch.full((5,), 9.0)}
    torch.testing.assert_close(state_of(model), expected, rtol=0, atol=0)


@on_ranks(2)
def test_what_has_values_keeps_them() -> None:
    torch.manual_seed(4)
    with torch.device("meta"):
        model = Model(sharded)
    init_parameters(model)
    model.load_state_dict(Model().state_dict())
    before = state_of(model)
    with torch.device("meta"):
        model.late = Affine(3, sharded)
    init_parameters(model)
    after = state_of(model)
    assert {name for name in after if name not in before} == {
        f"late.{n}" for n in ("weight", "bias", "order", "table")
    }
    torch.testing.assert_close({name: after[name] for name in before}, before, rtol=0, atol=0)


class Replaces(DistributedModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight = DistributedParameter(torch.empty(4))

    def reset_parameters(self) -> None:
        self.weight = nn.Parameter(torch.ones(4))


class Fails(Replaces):
    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)
        raise ValueError("no luck")


class ReplacesInside(DistributedModule):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Affine(5, sharded)
        self.scale = DistributedParameter(torch.ones(2))

    def reset_parameters(self) -> None:
        self.inner.weight = nn.Parameter(torch.ones(5, 3))


@on_ranks(2)
def test_a_failing_initialisation_leaves_the_parts_in_place() -> None:
    messages = []
    with torch.device("meta"):
        models = [Replaces(), ReplacesInside(), Fails()]
    for model in models:
        parameters = model._parameters
        with pytest.raises(ValueError) as caught:
            init_parameters(model)
        messages.append(str(caught.value))
        assert model._parameters is parameters and type(parameters) is dict
    weight = models[2]._parameters["weight"]
    assert isinstance(weight, DistributedParameter) and weight.shape == (4 // runtime.world_size(),)
    assert not has_values(weight)
    replaced, inside, failed = messages
    assert "Replaces gave it other parameters" in replaced
    assert "Affine gave it other parameters" in inside
    assert failed == "no luck"


class Keeps(DistributedModule):
    """Writes to its parameter by a reference of its own, from when it was not whole."""

    def __init__(self, write: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.weight = DistributedParameter(torch.empty(4, 3))
        self.kept = [self._parameters["weight"]]
        self.write = write

    def reset_parameters(self) -> None:
        assert self.kept[0] is not None and self.kept[0].shape == (4, 3)
        self.write(self.kept[0])


@on_ranks(2)
def test_a_write_to_a_parameter_that_is_not_whole_raises() -> None:
    messages = []
    for write in (nn.init.normal_, nn.init.zeros_):
        with torch.device("meta"):
            model = Keeps(write)
        with pytest.raises(ConfigError) as caught:
            init_parameters(model)
        messages.append(str(caught.value))
        assert not has_values(model._parameters["weight"])  # type: ignore[arg-type]
    refused, moved = messages
    assert refused.startswith(
        "Initialisation wrote to a parameter, by Keeps, when it was not whole."
    )
    assert moved.startswith("Initialisation wrote to weight when it was not whole.")


@on_ranks(2)
def test_a_plain_parameter_on_the_meta_device_is_refused() -> None:
    with torch.device("meta"):
        model = nn.Sequential(Affine(4, sharded), nn.Linear(4, 4))
    with pytest.raises(
        ConfigError,
        match=r"^Parameters 1\.weight, 1\.bias are on the meta device and not distributed",
    ):
        init_parameters(model)


def slices() -> list[torch.Tensor]:
    with torch.device("meta"):
        model = Affine(4, sharded)
        model.weight = DistributedParameter(
            torch.empty(2, 3), locality=[Locality("tp", split_dim=0)]
        )
    torch.manual_seed(7)
    init_parameters(model)
    return [model.state_dict()["weight"], model.weight, model.bias, torch.rand(2)]


def test_a_slice_is_that_of_the_whole_tensor_which_the_module_draws() -> None:
    plain = Affine(4, nn.Parameter)
    torch.manual_seed(7)
    plain.reset_parameters()
    following = torch.rand(2)
    results = run_ranks(slices, 2, init=grid_with(MeshAxis("tp", 2, 100, shards_data=False)))
    for own, (saved, weight, bias, drawn) in zip(plain.weight.chunk(2), results, strict=True):
        assert (
            torch.equal(saved, plain.weight)
            and torch.equal(weight, own)
            and torch.equal(bias, plain.bias)
        )
        assert torch.equal(drawn, following)
