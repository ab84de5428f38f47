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
from beside_torch import train_beside_torch
from scratch_axes import SLICE, STAGE, grid_with
from torch import nn

import bmt_checkpoint
from bmt_core.comm import Group
from bmt_core.errors import CheckpointError, ConfigError
from bmt_core.run.collectives import all_reduce
from bmt_core.run.runtime import current, rank, synchronize
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

IN, HIDDEN, WIDE, STAGES, STEPS = 3, 5, 8, 2, 3
GRIDS = {
    "one": (1, ()),
    "dp x slices": (4, (SLICE,)),
    "stages x dp": (4, (STAGE,)),
    "stages x slices": (4, (STAGE, SLICE)),
    "stages x dp x slices": (8, (STAGE, SLICE)),
}


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


def made(is_plain: bool, whole: torch.Tensor, *locality: Locality) -> nn.Parameter:
    """A parameter of this rank's slice of ``whole``, or an ordinary one."""
    if is_plain:
        return nn.Parameter(whole)
    topology = current().topology
    for place in locality:
        if place.split_dim is not None:
            size = topology.axis_size(place.axis)
            whole = whole.chunk(size, place.split_dim)[topology.axis_rank(place.axis)]
    return DistributedParameter(whole, locality=locality)


class Layer(nn.Module):
    """``bias + down(tanh(up(x * gain)))``, of which ``up`` and ``down`` are cut into slices of the
    wide dim.
    """

    def __init__(self, number: int, is_plain: bool) -> None:
        super().__init__()
        self.is_plain = is_plain
        generator = torch.Generator().manual_seed(number)
        draw = lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64)  # noqa: E731
        self.gain = made(is_plain, draw(HIDDEN), Locality("slice", gradients="share"))
        self.up = made(is_plain, draw(WIDE, HIDDEN), Locality("slice", split_dim=0))
        self.down = made(is_plain, draw(HIDDEN, WIDE), Locality("slice", split_dim=1))
        self.bias = made(is_plain, draw(HIDDEN), Locality("slice", gradients="whole"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_plain:
            return torch.tanh((x * self.gain) @ self.up.t()) @ self.down.t() + self.bias
        group = current().topology.group(("slice",))
        x = ToSlices.apply(x, group)
        return (
            all_reduce(torch.tanh((x * self.gain) @ self.up.t()) @ self.down.t(), comm=group)
            + self.bias
        )


class Net(DistributedModule):
    """``first``, then the layer of this rank's stage, then ``head``; for the level None all layers
    in plain torch, chosen by the data's stage.
    """

    def __init__(self, level: int | None = 3) -> None:
        super().__init__()
        self.is_plain = level is None
        generator = torch.Generator().manual_seed(100)
        draw = lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64)  # noqa: E731
        whole = Locality("slice", gradients="whole")
        self.first = made(self.is_plain, draw(HIDDEN, IN), whole)
        stages = range(STAGES) if level is None else own_stages()
        with local_along(("stage",)):
            self.layers = nn.ModuleDict(
                {str(stage): Layer(stage, self.is_plain) for stage in stages}
            )
        if level is not None:
            for layer in self.layers.values():
                Block(layer, zero_level=level, local_axes=("stage",))
        self.head = made(self.is_plain, draw(2, HIDDEN), whole)

    def forward(self, x: torch.Tensor, stage: int) -> torch.Tensor:
        return (self.layers[str(stage)](x @ self.first.t()) @ self.head.t()).pow(2).mean()


def own_stages() -> list[int]:
    topology = current().topology
    return [topology.axis_rank("stage")] if topology.axis_size("stage") > 1 else [*range(STAGES)]


def batches() -> torch.Tensor:
    """Per step and stage, 4 rows, which data-parallel ranks share among them."""
    return torch.randn(
        STEPS, STAGES, 4, IN, generator=torch.Generator().manual_seed(7), dtype=torch.float64
    )


def loss_of(net: Net, step: int, part: int, parts: int) -> torch.Tensor:
    """The mean over the stages that ``net`` has, of the rows of this rank or of all."""
    topology = current().topology
    dp, own = (1, 0) if net.is_plain else (topology.axis_size("dp"), topology.axis_rank("dp"))
    losses = [net(batches()[step, int(n)].chunk(dp)[own], int(n)) for n in net.layers]
    return torch.stack(losses).mean()


def train(level: int) -> list[str]:
    """Train, compare with plain torch, and return the names of the parameters of this rank."""
    net = Net(level)
    # After the first step to the accuracy of the factor by which gradients are clipped, which is
    # a float32 number.
    train_beside_torch(net, Net(None), loss_of, rtol=1e-6, rtol_of_first_gradients=1e-12)
    return [name for name, _ in net.named_parameters()]


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


@pytest.mark.parametrize(
    ("name", "level"),
    [("dp x slices", 0), ("stages x dp", 2), ("stages x slices", 1), ("stages x dp x slices", 3)],
)
def test_training_equals_plain_torch_on_every_grid(name: str, level: int) -> None:
    """Losses, gradients, norms, parameters: gradients that all ranks along an axis have whole count
    once, also in the norm.
    """
    ranks, axes = GRIDS[name]
    names = run_ranks(train, ranks, level, init=grid_with(*axes), timeout=120)
    assert set().union(*names) == dict(Net(None).named_parameters()).keys()


# ---- save, load and initialisation ----


def saved(path: str) -> None:
    net = Net()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(3)
    bmt_checkpoint.save(net, path)


def loaded(path: str) -> dict[str, torch.Tensor]:
    net = Net()
    bmt_checkpoint.load(net, path)
    return dict(net.state_dict())


def expected_state() -> dict[str, torch.Tensor]:
    return {name: value * 3 for name, value in Net(None).state_dict().items()}


@pytest.mark.parametrize("name", ["stages x dp", "stages x slices"])
def test_a_file_has_every_stages_layers_and_loads_into_every_grid(
    name: str, tmp_path: Path
) -> None:
    path = tmp_path / "model.pt"
    ranks, axes = GRIDS[name]
    run_ranks(saved, ranks, str(path), init=grid_with(*axes))
    state = torch.load(path, weights_only=True)
    assert list(state) == list(Net(None).state_dict())  # every layer, in the order of the model
    assert_equal(state, expected_state())
    Net(None).load_state_dict(state)  # and the plain model takes it
    for other in ("one", "stages x slices"):
        ranks, axes = GRIDS[other]
        for found in run_ranks(loaded, ranks, str(path), init=grid_with(*axes)):
            assert_equal(found, state)


@on_ranks(2, init=grid_with(STAGE))
def test_names_of_other_stages_are_neither_missing_nor_unexpected(tmp_path: Path) -> None:
    state, path, net = expected_state(), tmp_path / "model.pt", Net()
    del state["layers.1.bias"]
    if rank() == 0:
        torch.save(state, path)
    synchronize()
    with pytest.raises(CheckpointError, match=r"only the model has: layers\.1\.bias") as caught:
        bmt_checkpoint.load(net, str(path))
    assert "only the file has" not in str(caught.value)
    missing, unexpected = bmt_checkpoint.load(net, str(path), strict=False)
    assert not unexpected
    assert missing == [name for name in ["layers.1.bias"] if name in net.state_dict()]
    assert_equal({k: value for k, value in net.state_dict().items() if k in state}, state)


@on_ranks(4, init=grid_with(SLICE))
def test_state_dict_gives_whole_tensors_and_takes_them() -> None:
    net, other = Net(), Net()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.mul_(3)
    other.load_state_dict(net.state_dict())
    shapes = r"first: the checkpoint has shape \(2, 3\), the model \(5, 3\)"
    with pytest.raises(RuntimeError, match=shapes):
        other.load_state_dict({**net.state_dict(), "first": torch.zeros(2, 3)})
    assert_equal(dict(other.state_dict()), expected_state())


@on_ranks(2, init=grid_with(STAGE))
def test_states_of_own_parameters_need_names() -> None:
    net, manager = Net(), OptimManager()
    manager.add_optimizer(torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
    stage = own_stages()[0]
    manager.backward(net(batches()[0][stage], stage))
    manager.step()
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


@on_ranks(4, init=grid_with(STAGE, timeout=20))
def test_a_rank_that_makes_no_block_keeps_nobody_waiting() -> None:
    topology = current().topology
    if topology.axis_rank("stage") == 0:
        first_stage_trains()
    # Ranks that have made different numbers of groups before meet in a new one.
    across = all_reduce(torch.tensor(float(rank())), comm=topology.group(("stage",)))
    assert across == [2.0, 4.0, 2.0, 4.0][rank()]


def first_stage_trains() -> None:
    topology = current().topology
    torch.manual_seed(0)
    linear = nn.Linear(IN, 1, dtype=torch.float64)
    block = Block(copy.deepcopy(linear), local_axes=("stage",))
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (linear, block)]
    for batch in batches():
        expected = linear(batch[0]).pow(2).sum()
        loss = block(batch[0][2 * topology.axis_rank("dp") :][:2]).pow(2).sum()
        for each, optimizer in zip((expected, loss), optimizers, strict=True):
            optimizer.zero_grad()
            each.backward()
            optimizer.step()
        total = all_reduce(loss.detach(), comm=topology.shard_group(("stage",)))
        torch.testing.assert_close(total, expected.detach())
