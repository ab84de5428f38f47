"""Optimizer state as logical tensors by parameter name: independent of the ranks that hold
its parts.

The state of a parameter is ``{key: value}``. A tensor that is laid out like the parameter's shard
is stored whole, in the parameter's full shape (``(1,)`` for a parameter without dimensions, so that
it differs from a replicated number). Tensors in lists, tuples and dicts, and those of which a
tensor of another class consists, are saved in their places, each as if it were a value of its own.
Every other value must be the same on all ranks that have the parameter, and a number if the
parameter is sharded: a value that an optimizer computes from a whole shard (a maximum, scales of
blocks) would be wrong at another number of ranks, and is refused.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from bmt_core.comm.collective_section import collective_section
from bmt_core.comm.objects import all_gather_object, broadcast_object
from bmt_core.comm.protocols import Group
from bmt_core.errors import CheckpointError
from bmt_core.run.runtime import current
from bmt_core.run.runtime import rank as world_rank
from bmt_optim.current_run import world
from bmt_optim.managed_optimizer import ManagedOptimizer
from bmt_optim.state.composed_tensors import composed, in_parts
from bmt_optim.state.group_options import (
    Groups,
    check_options,
    load_options,
    matching_groups,
    named_groups,
)
from bmt_optim.state.nested_values import flattened, nested
from bmt_optim.state.state_form import checking_form
from bmt_optim.state.torch_state import Shapes, check_value_shapes
from bmt_params.parameter import DistributedParameter
from bmt_params.parameter_holders import first_holders, own_axes
from bmt_params.state.state_tensors import (
    StateOwner,
    StoredTensor,
    TensorName,
    TensorPart,
    parts_in,
    with_references,
    with_tensors,
)
from bmt_params.state.whole_state import LocalState, WholeState

_NOT_SAVED: Mapping[str, Shapes] = {}
Named = Iterable[tuple[str, torch.nn.Parameter]] | Mapping[str, torch.nn.Parameter]
State = dict[str, dict[str, Any]]


def logical_state(
    optimizers: Sequence[ManagedOptimizer], named_parameters: Named | None
) -> dict[str, Any]:
    """Return ``{"parameters": ..., "shapes": ..., "value_shapes": ..., "groups": ...}``.
    Collective.

    These are each parameter's state by name, with a :class:`TensorPart` for every tensor that is
    not a number; the shapes of the whole parameters, and of the tensors in their states, by name;
    and the groups' options. All but the parts is the same on every rank.
    """
    named_parameters = _kept(named_parameters)
    groups = _named_groups(optimizers, named_parameters)
    with collective_section(world(), "gathering the optimizer state"):
        parameters = _managed_parameters(optimizers, named_parameters)
    agreed = _agree(parameters)
    shapes = {name: list(info.shape) for name, info in agreed.items()}
    value_shapes = {
        name: {key: info.whole_shape(v) for key, v in info.values.items()}
        for name, info in agreed.items()
    }
    return {
        "parameters": _in_parts(parameters, agreed),
        "shapes": shapes,
        "value_shapes": value_shapes,
        "groups": groups,
    }


def check_logical_state(
    optimizers: Sequence[ManagedOptimizer], state: Mapping[str, Any], named_parameters: Named | None
) -> None:
    """Raise :class:`CheckpointError` on every rank if :func:`load_logical_state` would, and change
    nothing. Collective.
    """
    named_parameters = _kept(named_parameters)
    _matched_groups(optimizers, state, named_parameters)
    _compare(optimizers, named_parameters, state["parameters"], state.get("value_shapes", {}))


def load_logical_state(
    optimizers: Sequence[ManagedOptimizer], state: Mapping[str, Any], named_parameters: Named | None
) -> None:
    """Take over what :func:`logical_state` returned. Collective."""
    named_parameters = _kept(named_parameters)
    matched = _matched_groups(optimizers, state, named_parameters)
    scatter(optimizers, named_parameters, state["parameters"], state.get("value_shapes", {}))
    load_options(optimizers, matched)


def gather(optimizers: Sequence[ManagedOptimizer], named_parameters: Named | None) -> State:
    """Return name -> {key: whole tensor or number} on rank 0, and an empty dict elsewhere.
    Collective.
    """
    with collective_section(world(), "gathering the optimizer state"):
        parameters = _managed_parameters(optimizers, named_parameters)
    return whole_tensors(_in_parts(parameters, _agree(parameters)))


def gathered_state(
    optimizers: Sequence[ManagedOptimizer], named_parameters: Named | None
) -> dict[str, Any]:
    """Return :func:`logical_state` with whole tensors on rank 0, and without the parameters' states
    elsewhere. Collective.
    """
    logical = logical_state(optimizers, named_parameters)
    return {**logical, "parameters": whole_tensors(logical["parameters"])}


def whole_tensors(state: Mapping[str, Mapping[str, Any]]) -> State:
    """Return ``state`` with whole tensors in place of :class:`TensorPart` on rank 0, and an empty
    dict elsewhere. Collective.
    """
    what, is_first = "gathering the optimizer state", world().rank == 0
    with collective_section(world(), what) as results:
        local = LocalState.of_parts(parts_in(state))
        results.own = local.layout.summary
    whole = WholeState(local, what, results.of_ranks)
    with collective_section(world(), what):
        tensors = dict(whole.tensors(keep=is_first))
    return with_tensors(with_references(state), tensors.__getitem__) if is_first else {}


def _in_parts(
    parameters: Mapping[str, _ManagedParameter], infos: Mapping[str, _StateInfo]
) -> State:
    return {
        name: nested(
            {
                key: _part(name, key, info, agreed, parameters.get(name))
                for key, info in agreed.values.items()
            }
        )
        for name, agreed in infos.items()
    }


def _part(
    name: str, key: str, info: _ValueInfo, agreed: _StateInfo, parameter: _ManagedParameter | None
) -> Any:
    if not info.is_large:
        return info.small
    if parameter is None:  # a parameter of another stage
        return TensorName(f"{name}/{key}")
    p, shape, dtype = parameter.p, agreed.shape if info.is_sharded else info.shape, info.dtype
    assert shape is not None and dtype is not None

    def value() -> torch.Tensor:
        # A rank whose part is empty may have no state.
        found: torch.Tensor = parameter.state.get(key, torch.empty(0, dtype=dtype, device=p.device))
        return found

    owner = parameter.owner
    return TensorPart(
        name=f"{name}/{key}", shape=shape, dtype=dtype, parameter=p, value=value, owner=owner
    )


def scatter(
    optimizers: Sequence[ManagedOptimizer],
    named_parameters: Named | None,
    state: Mapping[str, Mapping[str, Any]],
    value_shapes: Mapping[str, Shapes] = _NOT_SAVED,
) -> None:
    """Give each parameter this rank's part of ``state``, which every rank passes, or rank 0 alone.
    Collective.

    ``value_shapes`` are the shapes of all tensors in ``state`` when it was saved, if that is known.
    After the first state was replaced, only errors that could not be detected before, such as those
    of the disk, are raised.
    """
    group = world()
    parameters, infos, is_on_all_ranks = _compare(optimizers, named_parameters, state, value_shapes)
    failure: Exception | None = None
    # Also parameters that only other ranks have: all ranks broadcast in one order.
    for name in infos:
        parameter, given = parameters.get(name), flattened(state.get(name, {}))
        new: dict[str, Any] = {}
        for key, info in infos[name].items():
            value: Any = info.small
            is_read = (
                group.rank == 0
                if not is_on_all_ranks
                else parameter is None or parameter.is_kept_here
            )
            if info.is_large and failure is None and is_read:
                try:
                    value = _read(given.get(key))
                except Exception as error:  # all ranks go on to the end, and raise there
                    failure = error
            if info.is_large and not is_on_all_ranks:
                value = _broadcast(value, info.shape, info.dtype, group, 0)
            if parameter is not None and failure is None:
                is_number = info.shape is None or (
                    not info.is_large and info.shape != parameter.shape
                )
                is_number |= parameter.owner is not None and not info.is_large
                if parameter.is_kept_here:
                    new[key] = parameter.number(key, value) if is_number else parameter.part(value)
        if parameter is not None and failure is None:
            parameter.optimizer.load_portable_state(parameter.p, composed(nested(new)))
    with collective_section(group, "loading the optimizer state"):
        if failure is not None:
            raise failure


def _compare(
    optimizers: Sequence[ManagedOptimizer],
    named_parameters: Named | None,
    state: Mapping[str, Mapping[str, Any]],
    value_shapes: Mapping[str, Shapes],
) -> tuple[dict[str, _ManagedParameter], dict[str, dict[str, _ValueInfo]], bool]:
    """Return the parameters, the values of each in ``state``, and whether every rank was given it;
    raise if they do not fit.
    """
    group = world()
    with collective_section(group, "loading the optimizer state"):
        parameters = _managed_parameters(optimizers, named_parameters)
    given = all_gather_object(bool(state) or not parameters, group)
    is_on_all_ranks = all(given)
    if not given[0]:  # the same on every rank
        raise CheckpointError(
            "Rank 0 was given no optimizer state. Pass what it gathered, or the same on every rank."
        )
    with collective_section(group, "loading the optimizer state"), checking_form():
        infos = _described(state)
    if not is_on_all_ranks:
        infos = broadcast_object(infos, group)
    with collective_section(group, "loading the optimizer state"), checking_form():
        _check(parameters, infos)
        if value_shapes:
            found = {
                name: {key: v.shape for key, v in values.items()} for name, values in infos.items()
            }
            check_value_shapes(found, value_shapes, "of ")
    return parameters, infos, is_on_all_ranks


def _described(state: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, _ValueInfo]]:
    if not isinstance(state, Mapping) or not all(
        isinstance(values, Mapping) for values in state.values()
    ):
        raise CheckpointError(
            "The optimizer state is damaged: it does not have the values of each parameter by name."
        )
    return {
        name: {key: _ValueInfo.of(v, is_sharded=False) for key, v in flattened(values).items()}
        for name, values in state.items()
    }


def _matched_groups(
    optimizers: Sequence[ManagedOptimizer], state: Mapping[str, Any], named_parameters: Named | None
) -> Groups:
    """Return the saved groups that match those here; raise on every rank if a group has no match,
    or its options do not fit.
    """
    groups = _named_groups(optimizers, named_parameters)
    with collective_section(world(), "loading the optimizer state"), checking_form():
        matched = matching_groups(state["groups"], groups)
        check_options(optimizers, matched)
        _check_shapes(_managed_parameters(optimizers, named_parameters), state.get("shapes", {}))
    return matched


@dataclass(frozen=True)
class _ManagedParameter:
    """A parameter, its optimizer, and its parameter group."""

    p: torch.nn.Parameter
    optimizer: ManagedOptimizer
    group: dict[str, Any]

    @property
    def state(self) -> dict[str, Any]:
        """The state on this rank, with tensors in lists and dicts as values of their own."""
        return flattened(in_parts(dict(self.optimizer.portable_state(self.p))))

    @property
    def shape(self) -> torch.Size:
        """Shape of the whole parameter, never without dimensions."""
        p = self.p
        shape = p.whole_shape if isinstance(p, DistributedParameter) else p.shape
        return shape or torch.Size((1,))

    @property
    def owner(self) -> StateOwner | None:
        """The rank that alone has the state; None if each rank has that of its own part."""
        return self.optimizer.state_owner(self.p)

    @property
    def is_kept_here(self) -> bool:
        """Whether this rank has any of the state."""
        return self.owner is None or self.owner.rank == world_rank()

    @property
    def has_state_of_part(self) -> bool:
        """Whether this rank's state is that of its part of the parameter."""
        return isinstance(self.p, DistributedParameter) and self.owner is None

    def is_sharded(self, value: Any) -> bool:
        """Whether ``value`` is laid out like the parameter's shard, judged by its shape on
        this rank.
        """
        p = self.p
        return self.has_state_of_part and isinstance(value, torch.Tensor) and value.shape == p.shape

    def part(self, full: torch.Tensor) -> torch.Tensor:
        """Return a copy of this rank's part of a whole tensor, on the parameter's device."""
        p = self.p
        if isinstance(p, DistributedParameter) and self.has_state_of_part:
            full = p.local_part(p.own_slice(full.reshape(p.whole_shape)))
        return full.detach().to(p.device, copy=True).contiguous()

    def number(self, key: str, value: Any) -> Any:
        """Return a copy of ``value``, the same on all ranks, on the device where torch's optimizers
        expect it.
        """
        if not isinstance(value, torch.Tensor):
            return value
        # torch keeps the count of steps on the host unless the step itself runs on the device.
        is_on_device = key != "step" or self.group.get("capturable") or self.group.get("fused")
        return value.detach().to(self.p.device if is_on_device else "cpu", copy=True)


def _managed_parameters(
    optimizers: Sequence[ManagedOptimizer], named_parameters: Named | None
) -> dict[str, _ManagedParameter]:
    given = named_parameters.items() if isinstance(named_parameters, Mapping) else named_parameters
    names: dict[torch.nn.Parameter, str] = {}
    for name, p in given or ():
        names.setdefault(p, name)
    parameters: dict[str, _ManagedParameter] = {}
    for i, optimizer in enumerate(optimizers):
        for j, group in enumerate(optimizer.param_groups):
            own_names = group.get("param_names") or [
                f"{i}.{j}.{k}" for k in range(len(group["params"]))
            ]
            for p, own_name in zip(group["params"], own_names, strict=True):
                if given is not None and p not in names:
                    raise CheckpointError(
                        f"Parameter {own_name} of optimizer {i}, of shape {tuple(p.shape)}, is not"
                        " among the named parameters. Pass those of the whole model."
                    )
                name = names.get(p, own_name)
                before = parameters.get(name)
                if before is not None and before.p is p and before.group is group:
                    continue  # twice in one group, of which torch warns
                if before is not None:
                    raise CheckpointError(_named_twice(name, is_same=before.p is p))
                parameters[name] = _ManagedParameter(p, optimizer, group)
    return parameters


def _named_twice(name: str, *, is_same: bool) -> str:
    if is_same:
        return (
            f"Parameter {name!r} is in two groups of the optimizers, and a whole state holds one"
            " state of each parameter. Leave it out of one, or save with state_dict()."
        )
    return (
        f"Two parameters of the optimizers have the name {name!r}. Pass those of a module that has"
        " both models: named_parameters=torch.nn.ModuleList([one, other]).named_parameters()."
    )


def _kept(named_parameters: Named | None) -> Named | None:
    """Return a dict, which can be iterated more than once, unlike ``model.named_parameters()``."""
    return None if named_parameters is None else dict(named_parameters)


def _named_groups(optimizers: Sequence[ManagedOptimizer], named_parameters: Named | None) -> Groups:
    with collective_section(world(), "naming the optimizers' parameters"):
        parameters = _managed_parameters(optimizers, named_parameters)
    return named_groups(optimizers, {parameter.p: name for name, parameter in parameters.items()})


@dataclass(frozen=True)
class _ValueInfo:
    """A rank's report about one value of a parameter's state, with a copy of the value if it is
    small.
    """

    shape: torch.Size | None
    dtype: torch.dtype | None
    is_sharded: bool
    small: Any

    @classmethod
    def of(cls, value: Any, *, is_sharded: bool) -> _ValueInfo:
        if not isinstance(value, (torch.Tensor, StoredTensor)):
            return cls(None, None, False, copy.deepcopy(value))
        is_small = value.shape.numel() == 1
        small = _read(value).detach().to("cpu", copy=True) if is_small else None
        return cls(value.shape, value.dtype, is_sharded, small)

    @property
    def is_large(self) -> bool:
        """Whether the value is a tensor that is not in ``small``, or is sharded."""
        return self.shape is not None and (self.is_sharded or self.small is None)

    def is_same_number(self, other: _ValueInfo) -> bool:
        """Whether both are the same number, tensor or not; NaN equals NaN."""
        a, b = self.small, other.small
        if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
            return type(a) is type(b) and bool(a == b or (a != a and b != b))
        return (
            a.shape == b.shape
            and a.dtype == b.dtype
            and bool(torch.allclose(a, b, rtol=0, atol=0, equal_nan=True))
        )


@dataclass(frozen=True)
class _StateInfo:
    """A rank's report about one parameter: its whole shape, the axes along which it is the rank's
    own, its state.
    """

    shape: torch.Size
    own_axes: frozenset[str]
    values: dict[str, _ValueInfo]
    is_of_part: bool
    """Whether the state is that of a rank's part of a parameter."""
    holder: int = 0
    """The first rank that has the parameter; set once all ranks have reported."""

    def whole_shape(self, value: _ValueInfo) -> list[int] | None:
        """Return the shape in which a checkpoint has ``value``, one of :attr:`values`; None if it
        is no tensor.
        """
        shape = self.shape if value.is_sharded else value.shape
        return None if shape is None else list(shape)


def _agree(parameters: Mapping[str, _ManagedParameter]) -> dict[str, _StateInfo]:
    """Merge the ranks' reports into one per name of the whole model, the same on all ranks.
    Collective.

    A rank whose shard is empty may have no state; a value that is laid out like the shard is so on
    every rank that has it. Raises :class:`CheckpointError` on every rank if optimizers have
    different parameters where they should have the same.
    """
    own = {
        name: _StateInfo(
            parameter.shape,
            own_axes([parameter.p]),
            {
                key: _ValueInfo.of(v, is_sharded=parameter.is_sharded(v))
                for key, v in parameter.state.items()
            },
            parameter.has_state_of_part,
        )
        for name, parameter in parameters.items()
    }
    reports: list[dict[str, _StateInfo]] = all_gather_object(own, world())
    axes = [{name: info.own_axes for name, info in report.items()} for report in reports]
    agreed = {}
    for name, holder in first_holders(
        world().ranks, [list(report) for report in reports], axes
    ).items():
        found = [report[name] for report in reports if name in report]
        keys = dict.fromkeys(key for info in found for key in info.values)
        values = {key: _agreed_value(name, key, found) for key in keys}
        agreed[name] = replace(reports[holder][name], holder=holder, values=values)
    return agreed


def _agreed_value(name: str, key: str, found: Sequence[_StateInfo]) -> _ValueInfo:
    values = [info.values[key] for info in found if key in info.values]
    if all(value.is_sharded for value in values):
        return values[0]
    value = next(value for value in values if not value.is_sharded)
    reason = None
    if any(other.shape is not None and other.small is None for other in values):
        # If the parameter is ordinary, every rank has the whole of it and the same state.
        reason = (
            f"has shape {tuple(value.shape or ())}, not that of a rank's shard"
            if found[0].is_of_part
            else None
        )
    elif not all(value.is_same_number(other) for other in values):
        reason = "differs between ranks"
    if reason is not None:
        raise CheckpointError(
            f"{key} of {name!r} {reason}: the optimizer computed it from one rank's part, or from"
            " tensors that it gathered itself, so it cannot be saved whole. Save with state_dict(),"
            " to load at the same number of ranks, or step whole tensors by bmt.optim.whole, which"
            " are saved with their states, or take an elementwise optimizer."
        )
    return value


def _check(
    parameters: Mapping[str, _ManagedParameter], infos: Mapping[str, Mapping[str, _ValueInfo]]
) -> None:
    missing = [name for name in parameters if name not in infos]
    if missing:
        raise CheckpointError(
            f"The optimizer state has nothing about {len(missing)} of {len(parameters)} parameters,"
            f" the first is {missing[0]!r}."
        )
    for name, parameter in parameters.items():
        shapes = {key: info.shape for key, info in infos[name].items()}
        complaint = (
            parameter.optimizer.complaint_about_state(shapes, parameter.shape) if shapes else None
        )
        if complaint is not None:
            raise CheckpointError(f"The state of {name!r} {complaint}.")
        if not parameter.has_state_of_part:
            continue
        for key, info in infos[name].items():
            if info.shape is not None and info.small is None and info.shape != parameter.shape:
                raise CheckpointError(
                    f"{key} of {name!r} has shape {tuple(info.shape)}, and the parameter here has"
                    f" {tuple(parameter.shape)}."
                )


def _check_shapes(
    parameters: Mapping[str, _ManagedParameter], shapes: Mapping[str, Sequence[int]]
) -> None:
    for name, parameter in parameters.items():
        if tuple(shapes.get(name, parameter.shape)) != parameter.shape:
            raise CheckpointError(
                f"The state of {name!r} is of a parameter of shape {tuple(shapes[name])}, and here"
                f" it has {tuple(parameter.shape)}."
            )


def _broadcast(
    source: torch.Tensor | None,
    shape: torch.Size | None,
    dtype: torch.dtype | None,
    group: Group,
    src: int,
) -> torch.Tensor:
    assert shape is not None
    buffer = torch.empty(shape, dtype=dtype, device=current().device)
    # None: it could not be read; all ranks raise at the end.
    if group.rank == src and source is not None:
        buffer.copy_(source)
    group.broadcast(buffer, src).wait()
    return buffer


def _read(value: Any) -> Any:
    return value.read() if isinstance(value, StoredTensor) else value
