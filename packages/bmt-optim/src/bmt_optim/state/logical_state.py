"""Optimizer state as logical tensors by parameter name: independent of the ranks that hold its parts.

The state of a parameter is ``{key: value}``. A tensor that lies like the parameter's shard is whole, in the parameter's full shape
(``(1,)`` for a parameter without dimensions, so that it differs from a replicated number); every other value is that of rank 0.

An optimizer that keeps state in a form of its own has the methods ``portable_state(parameter)``, which returns what is stored, and
``load_portable_state(parameter, state)``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from bmt_core.comm.objects import all_gather_object, broadcast_object, together
from bmt_core.errors import CheckpointError
from bmt_core.params.parameter import DistributedParameter
from bmt_core.run.runtime import current
from bmt_optim.current_run import world

if TYPE_CHECKING:
    from bmt_optim.manager import OptimManager

Named = Iterable[tuple[str, torch.nn.Parameter]] | Mapping[str, torch.nn.Parameter]
State = dict[str, dict[str, Any]]


def gather_state(manager: OptimManager, named_parameters: Named | None = None) -> State:
    """Return name -> {key: whole tensor or number} on rank 0, and an empty dict elsewhere. Collective.

    Tensors go to rank 0's host memory one by one; no rank holds more than one whole tensor besides.
    """
    manager.settle()
    return _gather(_places(manager.optimizers, named_parameters))


def scatter_state(
    manager: OptimManager, named_parameters: Named | None, state: Mapping[str, Mapping[str, Any]]
) -> None:
    """Give each parameter's optimizer this rank's part of ``state``, from :func:`gather_state` at any world size. Collective.

    Either every rank passes the state (mapped from a file, say), or rank 0 alone does and the others an empty dict; then it is
    broadcast tensor by tensor. When names or shapes do not fit, every rank raises :class:`CheckpointError`, with nothing changed.
    """
    manager.settle()
    _scatter(_places(manager.optimizers, named_parameters), state)


def logical_state(optimizers: Sequence[torch.optim.Optimizer], named_parameters: Named | None) -> dict[str, Any]:
    """Return ``{"parameters": ..., "groups": ...}``: what :func:`gather_state` returns, and the groups' options. Collective."""
    places = _places(optimizers, named_parameters)
    groups = [[_options(g) for g in optimizer.param_groups] for optimizer in optimizers]
    return {"parameters": _gather(places), "groups": groups}


def load_logical_state(
    optimizers: Sequence[torch.optim.Optimizer], state: Mapping[str, Any], named_parameters: Named | None
) -> None:
    """Take over what :func:`logical_state` returned. Collective."""
    places = _places(optimizers, named_parameters)
    with together(world(), "loading the optimizer state"):
        found = [len(groups) for groups in state["groups"]]
        expected = [len(optimizer.param_groups) for optimizer in optimizers]
        if found != expected:
            raise CheckpointError(
                f"The state has {found} parameter groups per optimizer, and here there are {expected}."
            )
    _scatter(places, state["parameters"])
    for optimizer, groups in zip(optimizers, state["groups"], strict=True):
        for target, saved in zip(optimizer.param_groups, groups, strict=True):
            target.update(saved)


@dataclass(frozen=True)
class _Place:
    """A parameter and the optimizer group that it is in."""

    parameter: torch.nn.Parameter
    optimizer: torch.optim.Optimizer
    group: dict[str, Any]

    @property
    def state(self) -> dict[str, Any]:
        if hasattr(self.optimizer, "portable_state"):
            return dict(self.optimizer.portable_state(self.parameter))
        found: dict[str, Any] = self.optimizer.state.get(self.parameter, {})
        return found

    def take(self, state: dict[str, Any]) -> None:
        """Give the parameter this state in place of its own."""
        if hasattr(self.optimizer, "load_portable_state"):
            self.optimizer.load_portable_state(self.parameter, state)
            return
        self.optimizer.state.pop(self.parameter, None)
        if state:
            self.optimizer.state[self.parameter] = state

    @property
    def shape(self) -> torch.Size:
        """Shape of the whole parameter, never without dimensions."""
        p = self.parameter
        shape = p._tp_original_shape if isinstance(p, DistributedParameter) else p.shape
        return shape or torch.Size((1,))

    def is_sharded(self, value: Any) -> bool:
        """Whether ``value`` lies like the parameter's shard, as far as this rank can see."""
        p = self.parameter
        return isinstance(p, DistributedParameter) and isinstance(value, torch.Tensor) and value.shape == p.shape

    def whole(self, part: torch.Tensor) -> torch.Tensor:
        """Return the whole tensor that ``part`` is this rank's part of. Collective."""
        p = self.parameter
        assert isinstance(p, DistributedParameter)
        full = p.gather_like(part.to(p.device))  # states may live on the host
        if p.local_axes:
            tp = current().topology.group(p.local_axes)
            slices = full.new_empty(tp.size * full.numel())
            tp.all_gather(slices, full.reshape(-1)).wait()
            full = torch.cat(slices.view(tp.size, *full.shape).unbind(0), dim=p._tp_split_dim)
        return full.reshape(self.shape)

    def part(self, full: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a whole tensor, where that is."""
        p = self.parameter
        assert isinstance(p, DistributedParameter)
        if p.local_axes:
            tp = current().topology.group(p.local_axes)
            full = full.chunk(tp.size, dim=p._tp_split_dim)[tp.rank]
        return p.local_part(full.reshape(p.full_shape))


def _places(optimizers: Sequence[torch.optim.Optimizer], named_parameters: Named | None) -> dict[str, _Place]:
    given = named_parameters.items() if isinstance(named_parameters, Mapping) else named_parameters
    names: dict[torch.nn.Parameter, str] = {}
    for name, parameter in given or ():
        names.setdefault(parameter, name)
    places: dict[str, _Place] = {}
    for i, optimizer in enumerate(optimizers):
        for j, group in enumerate(optimizer.param_groups):
            own_names = group.get("param_names") or [f"{i}.{j}.{k}" for k in range(len(group["params"]))]
            for parameter, own_name in zip(group["params"], own_names, strict=True):
                if given is not None and parameter not in names:
                    raise CheckpointError(
                        f"Parameter {own_name} of optimizer {i}, of shape {tuple(parameter.shape)}, is not among the named"
                        " parameters. Pass those of the whole model."
                    )
                places[names.get(parameter, own_name)] = _Place(parameter, optimizer, group)
    return places


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


@dataclass(frozen=True)
class _Value:
    """What a rank tells the others about one value of a parameter's state: a small one travels along."""

    shape: torch.Size | None
    dtype: torch.dtype | None
    is_sharded: bool
    small: Any

    @classmethod
    def of(cls, value: Any, *, is_sharded: bool) -> _Value:
        if not isinstance(value, torch.Tensor):
            return cls(None, None, False, value)
        small = value.detach().cpu() if value.numel() == 1 and not is_sharded else None
        return cls(value.shape, value.dtype, is_sharded, small)


def _gather(places: Mapping[str, _Place]) -> State:
    group = world()
    whole: State = {}
    for name, values in _agree_on_values(places).items():
        place = places[name]
        state = place.state
        entry: dict[str, Any] = {}
        for key, value in values.items():
            if value.is_sharded:
                empty = torch.empty(0, dtype=value.dtype, device=place.parameter.device)
                found: Any = place.whole(state.get(key, empty))
            else:
                found = state.get(key) if value.small is None else value.small
            if group.rank == 0:
                entry[key] = _to_host(found)
        whole[name] = entry
    return whole if group.rank == 0 else {}


def _agree_on_values(places: Mapping[str, _Place]) -> dict[str, dict[str, _Value]]:
    """Return for every name what its state consists of, the same on all ranks, in the order of rank 0. Collective.

    A rank whose shard is empty may have no state; what lies like the shard does so on every rank that has it.
    """
    own = {
        name: {key: _Value.of(v, is_sharded=place.is_sharded(v)) for key, v in place.state.items()}
        for name, place in places.items()
    }
    reports = all_gather_object(own, world())
    for rank, report in enumerate(reports):
        if report.keys() != own.keys():
            odd = sorted(report.keys() ^ own.keys())[0]
            raise CheckpointError(f"Parameter {odd!r} is in an optimizer of this rank or of rank {rank}, not of both.")
    agreed: dict[str, dict[str, _Value]] = {}
    for name in reports[0]:
        agreed[name] = {}
        for report in reports:
            for key, value in report[name].items():
                first = agreed[name].setdefault(key, value)
                if first.is_sharded and not value.is_sharded:
                    agreed[name][key] = value
    return agreed


def _scatter(places: Mapping[str, _Place], state: Mapping[str, Mapping[str, Any]]) -> None:
    group = world()
    given = all_gather_object(bool(state) or not places, group)
    is_on_all_ranks = all(given)
    with together(group, "loading the optimizer state"):
        if not given[0]:
            raise CheckpointError(
                "Rank 0 was given no optimizer state. Pass what it gathered, or the same on every rank."
            )
    contents = {
        name: {key: _Value.of(v, is_sharded=False) for key, v in values.items()} for name, values in state.items()
    }
    if not is_on_all_ranks:
        contents = broadcast_object(contents, group)
    with together(group, "loading the optimizer state"):
        _check(places, contents)
    for name, place in places.items():
        new: dict[str, Any] = {}
        for key, value in contents[name].items():
            if value.shape is None or (value.small is not None and value.shape != place.shape):
                new[key] = _number_for(place, key, value.small)
            elif is_on_all_ranks:
                new[key] = _own_part(place, state[name][key])
            else:
                source = state[name][key] if group.rank == 0 else None
                new[key] = _own_part(place, _broadcast(value, source, place.parameter.device))
        place.take(new)


def _check(places: Mapping[str, _Place], contents: Mapping[str, Mapping[str, _Value]]) -> None:
    missing = [name for name in places if name not in contents]
    if missing:
        raise CheckpointError(
            f"The optimizer state has nothing about {len(missing)} of {len(places)} parameters, the first is {missing[0]!r}."
        )
    for name, place in places.items():
        if not isinstance(place.parameter, DistributedParameter):
            continue
        for key, value in contents[name].items():
            if value.shape is not None and value.small is None and value.shape != place.shape:
                raise CheckpointError(
                    f"{key} of {name!r} has shape {tuple(value.shape)}, and the parameter here has {tuple(place.shape)}."
                )


def _broadcast(value: _Value, source: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    assert value.shape is not None
    buffer = torch.empty(value.shape, dtype=value.dtype, device=device)
    if world().rank == 0:
        assert source is not None
        buffer.copy_(source)
    world().broadcast(buffer).wait()
    return buffer


def _own_part(place: _Place, full: torch.Tensor) -> torch.Tensor:
    is_sharded = isinstance(place.parameter, DistributedParameter)
    part = place.part(full) if is_sharded else full
    return part.detach().to(place.parameter.device, copy=True).contiguous()


def _number_for(place: _Place, key: str, value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    # torch keeps the count of steps on the host unless the step itself runs on the device.
    is_on_device = key != "step" or place.group.get("capturable") or place.group.get("fused")
    return value.detach().to(place.parameter.device if is_on_device else "cpu", copy=True)


def _to_host(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value
