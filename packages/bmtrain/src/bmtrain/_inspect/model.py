"""``inspect_model``: statistics of the parameters of a model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import NamedTuple

import torch
from torch import nn

from bmt_core.comm.autograd import gather_stacked
from bmt_core.comm.collective_section import collective_section
from bmt_core.comm.objects import all_gather_object
from bmt_core.errors import ConfigError
from bmt_core.run.runtime import world_group
from bmt_params.parameter import DistributedParameter, reduce_held_back
from bmt_params.parameter_holders import first_holders, group_of_owners, own_axes
from bmt_params.state.model_tensors import whole_shape
from bmt_params.uninitialized import has_values
from bmtrain._inspect.statistics import NOTHING, Statistics, described, joined, moments, row


class _Place(NamedTuple):
    shape: tuple[int, ...]
    is_distributed: bool
    own_axes: frozenset[str]


def inspect_model(model: nn.Module, param_name: str, prefix: str = "") -> list[Statistics]:
    """Return statistics of the parameters of ``model`` whose name, with ``prefix`` before it,
    matches ``param_name``.

    ``param_name`` is a pattern for :mod:`fnmatch`, such as ``"*.layers.0.*"``. One dict per name,
    in the order of the model::

        name shape std mean max min grad_std grad_mean

    Statistics and shape are those of the whole parameter in plain torch, on every rank and for
    every grid: slices of tensor parallelism are joined, and the layers of all pipeline stages are
    included. ``std`` is unbiased, as ``Tensor.std()``; ``grad_std`` and ``grad_mean`` are 0 without
    a gradient. A gradient is described as it is in ``.grad``: summed over the ranks, and scaled if
    the loss was. For an ordinary parameter, the first rank's values and gradient are described.

    Each rank computes with its own parts, in float64, and a few numbers per parameter are exchanged
    in one collective; no parameter is gathered. Gradients that ``no_sync`` holds back are reduced
    first. Collective over all ranks.
    """
    world = world_group()
    parameters = {prefix + name: p for name, p in model.named_parameters(remove_duplicate=False)}
    found = {name: p for name, p in parameters.items() if fnmatchcase(name, param_name)}
    reduce_held_back(found.values())
    with collective_section(world, "inspect_model()"):
        rows = _rows_of(found)
    places = _places_in_model(parameters.values(), found)
    nothing = torch.tensor(NOTHING, dtype=torch.float64, device="cpu")
    table = torch.stack([nothing, *[rows.get(name, nothing) for name in places]])
    of_ranks = gather_stacked(table, world)[:, 1:].unbind(1)
    return [
        {"name": name, "shape": place.shape, **_statistics(place, numbers)}
        for (name, place), numbers in zip(places.items(), of_ranks, strict=True)
    ]


def _rows_of(parameters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the row of numbers, on the host, of this rank's part of each parameter."""
    found: dict[int, torch.Tensor] = {}
    for name, parameter in parameters.items():
        if not has_values(parameter):
            raise ConfigError(
                f"{name} has no values. Call init_parameters(model), or load a checkpoint, first."
            )
        if id(parameter) not in found:
            found[id(parameter)] = row(moments(parameter.data), parameter.grad)
    devices = {numbers.device for numbers in found.values()}
    for device in devices:  # one wait for each
        keys = [key for key, numbers in found.items() if numbers.device == device]
        found.update(zip(keys, torch.stack([found[key] for key in keys]).cpu(), strict=True))
    return {name: found[id(parameter)] for name, parameter in parameters.items()}


def _places_in_model(
    every: Iterable[torch.Tensor], found: Mapping[str, torch.Tensor]
) -> dict[str, _Place]:
    """Return the places of the parameters ``found`` on this and other stages, in the whole model's
    order. Collective.
    """
    owners = group_of_owners(every)
    own = {
        name: _Place(tuple(whole_shape(p)), isinstance(p, DistributedParameter), own_axes([p]))
        for name, p in found.items()
    }
    reports: list[dict[str, _Place]] = all_gather_object(own, owners)
    axes = [
        {name: p.own_axes for name, p in report.items() if p.is_distributed} for report in reports
    ]
    holders = first_holders(owners.ranks, [list(report) for report in reports], axes)
    return {name: reports[holder][name] for name, holder in holders.items()}


def _statistics(place: _Place, of_ranks: torch.Tensor) -> dict[str, float]:
    numel = torch.Size(place.shape).numel()
    if not place.is_distributed:
        first = (of_ranks[:, 0] > 0).int().argmax()
        return described(of_ranks[first])
    # Each element is on as many ranks as any other.
    return described(joined(of_ranks), numel)
