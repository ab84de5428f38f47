"""Training, saving and loading with parameters that are local along axes of a plugin, compared with
one process in plain torch.
"""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from scratch_axes import SLICE, STAGE, grid_with
from torch import nn

import bmt_checkpoint
import bmt_core
import bmt_params
from bmt_core import MeshAxis
from bmt_core.comm import Group
from bmt_core.errors import CheckpointError, ConfigError
from bmt_core.run.collectives import all_reduce
from bmt_core.run.runtime import current, rank
from bmt_optim import OptimManager
from bmt_params import (
    DistributedModule,
    DistributedParameter,
    Locality,
    ParameterInitializer,
    local_along,
)
from bmt_testing import on_ranks, run_ranks
from bmt_zero import Block

IN, HIDDEN, WIDE, STAGES, STEPS, MAX_NORM = 3, 5, 8, 2, 3, 0.5
NORMAL = ParameterInitializer(nn.init.normal_, std=0.5)
GRIDS = {
    "one": (1, ()),
    "slices": (2, (SLICE,)),
    "stages": (2, (STAGE,)),
    "dp x slices": (4, (SLICE,)),
    "stages x dp": (4, (STAGE,)),
    "stages x slices": (4, (STAGE, SLICE)),
    "stages x dp x slices": (8, (STAGE, SLICE)),
}


MOVED = ["slices", "stages x dp", "stages x slices"]
"""Grids whose state other grids load."""


class ToSlices(torch.autograd.Function):
    """The identity, before a computation of which each rank of ``group`` does a slice: gradients
    are summed over it.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        total = grads[0].clone()
        ctx.group.all_reduce(total).wait()
        return total, None


def made(whole: torch.Tensor, *locality: Locality) -> nn.Parameter:
    """A parameter of this rank's slice of ``whole``; an ordinary one without a run."""
    if not bmt_core.is_initialized():
        return nn.Parameter(whole)
    topology = current().topology
    for place in locality:
        if place.split_dim is not None:
            size = topology.axis_size(place.axis)
            whole = whole.chunk(size, place.split_dim)[topology.axis_rank(place.axis)]
    return DistributedParameter(whole, init_method=NORMAL, locality=locality)


class Layer(nn.Module):
    """``bias + down(tanh(up(x * gain)))``, of which ``up`` and ``down`` are cut into slices of the
    wide dim.
    """

    def __init__(self, number: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(number)
        draw = lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64)  # noqa: E731
        self.gain = made(draw(HIDDEN), Locality("slice", gradients="share"))
        self.up = made(draw(WIDE, HIDDEN), Locality("slice", split_dim=0))
        self.down = made(draw(HIDDEN, WIDE), Locality("slice", split_dim=1))
        self.bias = made(draw(HIDDEN), Locality("slice", gradients="whole"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not bmt_core.is_initialized():
            return torch.tanh((x * self.gain) @ self.up.t()) @ self.down.t() + self.bias
        group = current().topology.group(("slice",))
        x = ToSlices.apply(x, group)
        return (
            all_reduce(torch.tanh((x * self.gain) @ self.up.t()) @ self.down.t(), comm=group)
            + self.bias
        )


class Net(DistributedModule):
    """``first``, then the layer of this rank's stage, then ``head``; of one process, all layers,
    chosen by the data's stage.
    """

    def __init__(self, level: int = 3) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(100)
        self.first = made(
            torch.randn(HIDDEN, IN, generator=generator, dtype=torch.float64),
            Locality("slice", gradients="whole"),
        )
        with local_along(("stage",)):
            self.layers = nn.ModuleDict({str(stage): Layer(stage) for stage in own_stages()})
        if bmt_core.is_initialized():
            for layer in self.layers.values():
                Block(layer, zero_level=level, local_axes=("stage",))
        self.head = made(
            torch.randn(2, HIDDEN, generator=generator, dtype=torch.float64),
            Locality("slice", gradients="whole"),
        )

    def forward(self, x: torch.Tensor, stage: int) -> torch.Tensor:
        return (self.layers[str(stage)](x @ self.first.t()) @ self.head.t()).pow(2).mean()


def own_stages() -> list[int]:
    if not bmt_core.is_initialized() or current().topology.axis_size("stage") == 1:
        return list(range(STAGES))
    return [current().topology.axis_rank("stage")]


def batches() -> torch.Tensor:
    """Per step and stage, 4 rows, which data-parallel ranks share among them."""
    return torch.randn(
        STEPS, STAGES, 4, IN, generator=torch.Generator().manual_seed(7), dtype=torch.float64
    )


def expected_training() -> tuple[
    list[float], list[float], dict[str, torch.Tensor], list[dict[str, torch.Tensor]]
]:
    """One process: the losses, norms, parameters after the last step, and gradients before clipping
    of each step.
    """
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
    losses, norms, gradients = [], [], []
    for batch in batches():
        optimizer.zero_grad()
        loss = torch.stack([net(batch[stage], stage) for stage in range(STAGES)]).mean()
        loss.backward()
        gradients.append(
            {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}
        )
        norms.append(float(torch.nn.utils.clip_grad_norm_(net.parameters(), MAX_NORM)))
        losses.append(float(loss.detach()))
        optimizer.step()
    return losses, norms, dict(net.state_dict()), gradients


def sharded_training(
    level: int,
) -> tuple[list[float], list[float], dict[str, Any], list[dict[str, Any]]]:
    """The same on ranks; every rank returns what it has."""
    net = Net(level)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
    manager = OptimManager()
    manager.add_optimizer(optimizer)
    topology = current().topology
    rows = 4 // topology.axis_size("dp")
    first_row = rows * topology.axis_rank("dp")
    losses, norms, gradients = [], [], []
    for batch in batches():
        manager.zero_grad()
        own = [net(batch[stage][first_row : first_row + rows], stage) for stage in own_stages()]
        loss = torch.stack(own).mean()
        manager.backward(loss)
        gradients.append({n: p.gather_all_like(p.grad).clone() for n, p in net.named_parameters()})  # type: ignore[attr-defined]
        norms.append(float(manager.clip_grad_norm(optimizer.param_groups, MAX_NORM)))
        losses.append(float(all_reduce(loss.detach(), "avg")))
        manager.step()
    return losses, norms, dict(net.state_dict()), gradients


def assert_equal(
    found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float = 1e-12
) -> None:
    for name, value in found.items():
        torch.testing.assert_close(
            value,
            expected[name],
            rtol=tolerance,
            atol=tolerance,
            msg=lambda text, name=name: f"{name}: {text}",
        )


def check_training(ranks: int, axes: tuple[MeshAxis, ...], level: int) -> None:
    losses, norms, parameters, gradients = expected_training()
    results = run_ranks(sharded_training, ranks, level, init=grid_with(*axes), timeout=120)
    for found in results:
        assert_equal(found[3][0], gradients[0])
        # From here on to the accuracy of the factor by which gradients are clipped, which is a
        # float32 number.
        assert found[1] == pytest.approx(norms, rel=1e-6)
        assert found[0] == pytest.approx(losses, rel=1e-6)
        assert_equal(found[2], parameters, 1e-6)
        for step, expected in zip(found[3], gradients, strict=True):
            assert_equal(step, expected, 1e-6)
    assert set().union(*[found[2] for found in results]) == set(parameters)


@pytest.mark.parametrize(
    ("name", "level"),
    [
        ("slices", 0),
        ("stages", 1),
        ("dp x slices", 3),
        ("stages x dp", 2),
        ("stages x slices", 3),
        ("stages x dp x slices", 3),
    ],
)
def test_training_equals_plain_torch_on_every_grid(name: str, level: int) -> None:
    """Losses, gradients, norms, parameters: gradients that all ranks along an axis have whole count
    once, also in the norm.
    """
    check_training(*GRIDS[name], level)


# ---- save, load and initialisation ----


def saved(path: str) -> None:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(3)
    bmt_checkpoint.save(net, path)
    del optimizer


def loaded(path: str) -> dict[str, torch.Tensor]:
    net = Net()
    bmt_checkpoint.load(net, path)
    return dict(net.state_dict())


def expected_state() -> dict[str, torch.Tensor]:
    return {name: value * 3 for name, value in Net().state_dict().items()}


@pytest.mark.parametrize("name", MOVED)
def test_a_file_has_every_stages_layers_and_loads_into_every_grid(
    name: str, tmp_path: Path
) -> None:
    path = tmp_path / "model.pt"
    ranks, axes = GRIDS[name]
    run_ranks(saved, ranks, str(path), init=grid_with(*axes))
    state = torch.load(path, weights_only=True)
    assert list(state) == list(Net().state_dict())  # every layer, in the order of the model
    assert_equal(state, expected_state())
    Net().load_state_dict(state)  # and the plain model takes it
    for other in ("one", "stages x slices"):
        ranks, axes = GRIDS[other]
        for found in run_ranks(loaded, ranks, str(path), init=grid_with(*axes)):
            assert_equal(found, state)


def loads_what_misses(path: str) -> tuple[str, dict[str, torch.Tensor]]:
    net = Net()
    with pytest.raises(CheckpointError) as caught:
        bmt_checkpoint.load(net, path)
    missing, unexpected = bmt_checkpoint.load(net, path, strict=False)
    assert not unexpected and missing == [
        name for name in ["layers.1.bias"] if name in net.state_dict()
    ]
    return str(caught.value), dict(net.state_dict())


def test_names_of_other_stages_are_neither_missing_nor_unexpected(tmp_path: Path) -> None:
    state = expected_state()
    del state["layers.1.bias"]
    torch.save(state, tmp_path / "model.pt")
    results = run_ranks(loads_what_misses, 2, str(tmp_path / "model.pt"), init=grid_with(STAGE))
    for said, found in results:
        assert "only the model has: layers.1.bias" in said and "only the file has" not in said
        assert_equal({name: value for name, value in found.items() if name in state}, state)


def initialised() -> tuple[dict[str, torch.Tensor], float]:
    net = Net()
    bmt_params.init_parameters(net)
    return dict(net.state_dict()), float(torch.rand(()))


@pytest.mark.parametrize("name", MOVED)
def test_initial_values_are_those_of_whole_tensors_in_one_process(name: str) -> None:
    net = Net()
    torch.manual_seed(11)
    for parameter in net.parameters():
        nn.init.normal_(parameter, std=0.5)
    expected, following = dict(net.state_dict()), float(torch.rand(()))
    ranks, axes = GRIDS[name]
    for found, number in run_ranks(initialised, ranks, init=grid_with(*axes, seed=11)):
        assert_equal(found, expected)
        assert number == following  # the generators agree afterwards


def state_dicts_both_ways() -> dict[str, torch.Tensor]:
    net, other = Net(), Net()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(3)
    other.load_state_dict(net.state_dict())
    with pytest.raises(
        RuntimeError, match=r"first: the checkpoint has shape \(2, 3\), the model \(5, 3\)"
    ):
        other.load_state_dict({**net.state_dict(), "first": torch.zeros(2, 3)})
    return dict(other.state_dict())


def test_state_dict_gives_whole_tensors_and_takes_them() -> None:
    for found in run_ranks(state_dicts_both_ways, 4, init=grid_with(SLICE)):
        assert_equal(found, expected_state())


def momentum_of(net: Net, *, steps: int) -> tuple[OptimManager, dict[str, torch.Tensor]]:
    """A manager that has trained ``net`` for ``steps``, and the momentum of this rank's
    parameters, whole.
    """
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    manager = OptimManager()
    manager.add_optimizer(optimizer)
    for batch in batches()[:steps]:
        manager.zero_grad()
        manager.backward(torch.stack([net(batch[stage], stage) for stage in own_stages()]).mean())
        manager.step()
    parts = {
        name: (p, optimizer.state[p].get("momentum_buffer", torch.empty(0)))
        for name, p in net.named_parameters()
    }
    return manager, {name: p.gather_all_like(part.to(p.dtype)) for name, (p, part) in parts.items()}  # type: ignore[attr-defined]


def states_of_optimizers() -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    net = Net()
    manager, momentum = momentum_of(net, steps=2)
    return manager.state_dict(gather_opt=True, named_parameters=net.named_parameters()), momentum


def loads_states_of_optimizers(state: dict[str, Any], is_on_all_ranks: bool) -> dict[str, Any]:
    net = Net()
    manager, _ = momentum_of(net, steps=1)
    manager.load_logical_state(
        net.named_parameters(), state if rank() == 0 or is_on_all_ranks else None
    )
    return manager.state_dict(gather_opt=True, named_parameters=net.named_parameters())


@pytest.mark.parametrize("name", MOVED)
def test_the_state_of_optimizers_has_every_stages_layers_and_loads_into_every_grid(
    name: str,
) -> None:
    ranks, axes = GRIDS[name]
    (state, _), *others = results = run_ranks(states_of_optimizers, ranks, init=grid_with(*axes))
    assert all(other["logical"]["parameters"] == {} for other, _ in others)
    parameters = state["logical"]["parameters"]
    assert list(parameters) == list(Net().state_dict())
    for _, momentum in results:
        assert_equal(
            {name: parameters[name]["momentum_buffer"] for name in momentum}, momentum, 0.0
        )
    for other, is_on_all_ranks in (
        ("one", True),
        ("stages x slices", False),
        ("stages x slices", True),
    ):
        ranks, axes = GRIDS[other]
        found, *_ = run_ranks(
            loads_states_of_optimizers, ranks, state, is_on_all_ranks, init=grid_with(*axes)
        )
        torch.testing.assert_close(found["logical"].pop("parameters"), parameters, rtol=0, atol=0)
        assert found == {
            **state,
            "logical": {k: v for k, v in state["logical"].items() if k != "parameters"},
        }


@on_ranks(2, init=grid_with(STAGE))
def test_states_of_own_parameters_need_names() -> None:
    manager, _ = momentum_of(Net(), steps=1)
    said = r"^Ranks \[0, 1\] each have a parameter of their own, and all call it 0\.0\.2\."
    with pytest.raises(CheckpointError, match=said):
        manager.logical_state()


@on_ranks(2, init=grid_with(STAGE))
def test_own_parameters_of_one_name_are_refused(tmp_path: Path) -> None:
    net = nn.Module()
    net.layer = Block(nn.Linear(2, 2), local_axes=("stage",))
    said = r"^Ranks \[0, 1\] each have a parameter of their own, and all call it layer\.weight\."
    with pytest.raises(CheckpointError, match=said):
        bmt_checkpoint.save(net, str(tmp_path / "model.pt"))


@on_ranks(2, init=grid_with(STAGE))
def test_a_sharded_parameter_that_some_ranks_lack_is_refused(tmp_path: Path) -> None:
    net = nn.Module()
    net.own = Block(nn.Linear(2, 2), local_axes=("stage",)) if rank() == 0 else None
    if rank() == 1:
        net.extra = DistributedParameter(torch.ones(4))
    said = r"extra is sharded over ranks \[0, 1\], and only ranks \[1\] have it\."
    with pytest.raises(CheckpointError, match=said):
        bmt_checkpoint.save(net, str(tmp_path / "model.pt"))


# ---- what a locality is ----


@on_ranks(4, init=grid_with(STAGE, SLICE))
def test_copies_and_pickles_keep_locality() -> None:
    net = Net()
    buffer = io.BytesIO()
    torch.save(net, buffer)
    buffer.seek(0)
    for twin in (copy.deepcopy(net), torch.load(buffer, weights_only=False)):
        for (name, parameter), other in zip(net.named_parameters(), twin.parameters(), strict=True):
            assert (
                isinstance(parameter, DistributedParameter) and type(other) is DistributedParameter
            )
            assert (
                other.locality == parameter.locality and other.shard_group is parameter.shard_group
            ), name
            assert (
                other.whole_shape == parameter.whole_shape and other.replicas == parameter.replicas
            )
        assert_equal(dict(twin.state_dict()), dict(net.state_dict()))
    own = net.layers[str(own_stages()[0])].up
    assert own.locality == (
        Locality("slice", split_dim=0),
        Locality("stage"),
    ) and own.local_axes == {"slice", "stage"}
    assert own.shard_group.size == 1 and own.full_shape == (4, 5) and own.whole_shape == (8, 5)


@on_ranks(4, init={"tp_size": 2})
def test_bmtrains_attributes_of_a_parameter_say_where_its_part_lies() -> None:
    """BMTrain's names of where a parameter's part lies, for one that is cut along ``tp`` and one
    that is not.
    """
    from bmtrain import DistributedParameter  # which adds the names

    topology = current().topology
    draw = ParameterInitializer(nn.init.ones_)
    cut = DistributedParameter(torch.empty(4, 3), init_method=draw, tp_mode=True, tp_split_dim=0)
    replicated = DistributedParameter(torch.empty(5), tp_mode=True)
    plain = DistributedParameter(torch.empty(4, 3))
    assert [p._tp_mode for p in (cut, replicated, plain)] == [True, True, False]
    assert [p._tp_split_dim for p in (cut, replicated, plain)] == [0, -1, -1]
    assert [tuple(p._original_shape) for p in (cut, replicated, plain)] == [(4, 3), (5,), (4, 3)]
    assert [tuple(p._tp_original_shape) for p in (cut, replicated, plain)] == [(8, 3), (5,), (4, 3)]
    assert cut._init_method is draw and plain._init_method is None
    # dp = 2 x tp = 2: a slice is sharded over two ranks, the rest over all four.
    tp = topology.axis_rank("tp")
    groups = [tuple(p._zero_comm.ranks) for p in (cut, replicated, plain)]
    assert groups == [(tp, tp + 2), (0, 1, 2, 3), (0, 1, 2, 3)]
    for parameter in (cut, replicated, plain):
        assert parameter._end_partition - parameter._start_partition == parameter.numel()
    ends = [
        (cut._start_partition, cut._end_partition),
        (plain._start_partition, plain._end_partition),
    ]
    assert ends == [[(0, 6), (6, 12)][topology.axis_rank("dp")], (3 * rank(), 3 * rank() + 3)]
    layer = Block(nn.Linear(3, 3))
    assert not plain._in_block and all(parameter._in_block for parameter in layer.parameters())


@on_ranks(2, init=grid_with(SLICE))
def test_localities_that_make_no_sense_are_refused() -> None:
    data = torch.zeros(4, 4)
    cut = Locality("slice", split_dim=0)
    with pytest.raises(ConfigError, match="cuts dim 2, and the parameter has 2 dims"):
        DistributedParameter(data, locality=[Locality("slice", split_dim=2)])
    with pytest.raises(ConfigError, match="along 'slice' is given twice"):
        DistributedParameter(data, locality=[cut, Locality("slice")])
    with pytest.raises(
        ConfigError,
        match=r"local along 'slice', and its group of ranks \(0, 1\) reaches over that axis",
    ):
        DistributedParameter(data, group=current().world, locality=[cut])
    with pytest.raises(TypeError, match="with a str in it"):
        DistributedParameter(data, locality=["slice"])  # type: ignore[list-item]
    with pytest.raises(ConfigError, match=r"either cut .* or replicated"):
        Locality("slice", split_dim=0, gradients="whole")
    with pytest.raises(ConfigError, match="must be 'share' or 'whole', not 'half'"):
        Locality("slice", gradients="half")  # type: ignore[arg-type]
    shared = nn.Module()
    shared.weight = DistributedParameter(data, locality=[Locality("slice", gradients="share")])
    with pytest.raises(
        ConfigError, match="'weight' has a share of its gradient on each rank along 'slice'"
    ):
        Block(shared, local_axes=("slice",))
    with pytest.raises(ConfigError, match=r"such as \('slice',\), not a text"):
        Block(nn.Linear(2, 2), local_axes="slice")


# ---- who waits for whom ----


def only_the_first_stage_trains() -> tuple[list[float], float]:
    topology = current().topology
    losses = first_stage_losses() if topology.axis_rank("stage") == 0 else []
    # Ranks that have made different numbers of groups before meet in a new one.
    across = all_reduce(torch.tensor(float(rank())), comm=topology.group(("stage",)))
    return losses, float(across)


def first_stage_losses() -> list[float]:
    topology = current().topology
    torch.manual_seed(0)
    block = Block(nn.Linear(IN, 1, dtype=torch.float64), local_axes=("stage",))
    optimizer = torch.optim.SGD(block.parameters(), lr=0.1)
    losses = []
    for batch in batches():
        optimizer.zero_grad()
        loss = block(batch[0][2 * topology.axis_rank("dp") :][:2]).pow(2).sum()
        loss.backward()
        optimizer.step()
        losses.append(float(all_reduce(loss.detach(), comm=topology.shard_group(("stage",)))))
    return losses


def test_a_rank_that_makes_no_block_keeps_nobody_waiting() -> None:
    torch.manual_seed(0)
    linear = nn.Linear(IN, 1, dtype=torch.float64)
    optimizer = torch.optim.SGD(linear.parameters(), lr=0.1)
    expected = []
    for batch in batches():
        optimizer.zero_grad()
        loss = linear(batch[0]).pow(2).sum()
        loss.backward()
        optimizer.step()
        expected.append(float(loss.detach()))
    first, second, third, fourth = run_ranks(
        only_the_first_stage_trains, 4, init=grid_with(STAGE, timeout=20)
    )
    assert first[0] == second[0] == pytest.approx(expected) and third[0] == fourth[0] == []
    assert [first[1], second[1], third[1], fourth[1]] == [2.0, 4.0, 2.0, 4.0]
