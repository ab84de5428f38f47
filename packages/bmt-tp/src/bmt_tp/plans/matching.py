"""``match``: apply the patterns of a plan to the modules and parameters of a model. It changes and
communicates nothing.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase

from torch import nn

from bmt_core.errors import ConfigError
from bmt_params import DistributedParameter, Locality
from bmt_tp.plans.activations import Change
from bmt_tp.plans.plan import Plan
from bmt_tp.plans.styles import OWN_ROWS, PlannedModule, Style


@dataclass(frozen=True)
class Claim:
    """The locality that the plan's entry ``pattern`` gives to a parameter."""

    pattern: str
    locality: Locality


@dataclass(frozen=True)
class Match:
    """The changes that :func:`parallelize` makes, by names of modules and parameters."""

    styles: dict[str, Style] = field(default_factory=dict)
    claims: dict[str, Claim] = field(default_factory=dict)
    changes: dict[str, Change] = field(default_factory=dict)
    divided: dict[str, tuple[str, ...]] = field(default_factory=dict)


def match(model: nn.Module, plan: Plan, tp_size: int) -> Match:
    """Apply ``plan`` to the names in ``model``. Raises :class:`ConfigError` if the plan does
    not fit.
    """
    found = Match()
    distributed = [
        name
        for name, parameter in model.named_parameters()
        if isinstance(parameter, DistributedParameter)
    ]
    if distributed:
        raise ConfigError(
            f"{distributed[0]} is distributed already. Call parallelize() on the plain model, then"
            " make Blocks or wrap it."
        )
    for pattern, style in plan.parameters.items():
        for name, module in _named_by(model, pattern):
            planned = PlannedModule(
                name=name, module=module, config=getattr(model, "config", None), tp_size=tp_size
            )
            for key, locality in style.localities(planned).items():
                _claim(found, f"{name}.{key}", Claim(pattern, locality))
            found.styles[name] = style
    _match_activations(found, model, plan)
    for pattern, attributes in plan.divided.items():
        for name, module in _named_by(model, pattern):
            planned = PlannedModule(name=name, module=module, config=None, tp_size=tp_size)
            for attribute in attributes:
                planned.check_divisible(planned_number(planned, attribute), attribute)
            found.divided[name] = attributes
    _check_parameters(found, model, plan, tp_size)
    return found


def fits(pattern: str, name: str) -> bool:
    """Whether ``pattern`` matches the module's name. Each part between dots is matched
    by ``fnmatch``.

    >>> fits("layers.*.mlp", "layers.3.mlp"), fits("layers.*", "layers.3.mlp")
    (True, False)
    """
    wanted, parts = pattern.split("."), name.split(".")
    return len(wanted) == len(parts) and all(
        fnmatchcase(part, glob) for glob, part in zip(wanted, parts, strict=True)
    )


def planned_number(planned: PlannedModule, attribute: str) -> int:
    """Return the value of an attribute that :attr:`Plan.divided` names."""
    number = getattr(planned.module, attribute, None)
    if not isinstance(number, int):
        raise planned.misfit(
            f"it has no number {attribute!r}, which the plan divides by tp_size. Name an attribute"
            " that counts heads or features."
        )
    return number


def _named_by(model: nn.Module, pattern: str) -> Iterator[tuple[str, nn.Module]]:
    named = dict(model.named_modules())
    found = [name for name in named if fits(pattern, name)]
    if not found:
        near = difflib.get_close_matches(pattern, [name for name in named if name], 3, 0.3)
        raise ConfigError(
            f"Pattern {pattern!r} of the plan matches no module of {type(model).__name__}."
            f" Modules with similar names: {', '.join(near) or 'none'}. A * matches no dot."
        )
    return ((name, named[name]) for name in found)


def _claim(found: Match, name: str, claim: Claim) -> None:
    before = found.claims.setdefault(name, claim)
    if before is not claim:
        raise ConfigError(
            f"{name} is claimed by two entries of the plan, {before.pattern!r} and"
            f" {claim.pattern!r}. Leave one of them out."
        )


def _match_activations(found: Match, model: nn.Module, plan: Plan) -> None:
    def change(name: str, module: nn.Module) -> Change:
        return found.changes.get(name) or Change(
            argument=next(iter(inspect.signature(module.forward).parameters))
        )

    for number, (name, module) in enumerate(_named_by(model, plan.layers)):
        before = change(name, module)
        found.changes[name] = replace(
            before, own_random_numbers=True, input=None if number else "own_rows"
        )
    for pattern, layout in plan.gathered.items():
        for name, module in _named_by(model, pattern):
            found.changes[name] = replace(change(name, module), input=layout)
    last, *more = _named_by(model, plan.last)
    if more:
        raise ConfigError(
            f"Pattern {plan.last!r} of the plan names several modules as the last one: {last[0]},"
            f" {more[0][0]}. Plan(last=...) must match exactly one."
        )
    found.changes[last[0]] = replace(change(*last), output_is_whole=True)


def _check_parameters(found: Match, model: nn.Module, plan: Plan, tp_size: int) -> None:
    on_rows = [
        f"{name}." for pattern in (plan.layers, plan.last) for name, _ in _named_by(model, pattern)
    ]
    first: dict[nn.Parameter, str] = {}
    named = list(model.named_parameters(remove_duplicate=False))
    inside = {parameter for name, parameter in named if name.startswith(tuple(on_rows))}
    for name, parameter in named:
        claim = found.claims.get(name)
        is_on_rows = name.startswith(tuple(on_rows))
        if claim is None and not (is_on_rows and parameter.dim() < 2):
            where = "inside" if is_on_rows else "outside"
            style = (
                "PerPosition() if it computes each position by itself"
                if is_on_rows
                else "Whole() if every rank computes it whole"
            )
            raise ConfigError(
                f"No entry of the plan names {name} of shape {tuple(parameter.shape)}, {where} of"
                f" the layers ({plan.layers!r}, {plan.last!r}). Name its module with a style, such"
                f" as {style}. Only 1-D parameters inside of the layers, as norms have, may be"
                " left out."
            )
        claim = found.claims.setdefault(name, Claim(plan.layers, OWN_ROWS))
        if claim.locality == OWN_ROWS and parameter not in inside:
            raise ConfigError(
                f"{name} is outside of the layers ({plan.layers!r}, {plan.last!r}), where every"
                " rank computes all positions, and its style sums the gradients of ranks that have"
                f" different ones: they would be {tp_size} times too large. Choose Whole()."
            )
        other = first.setdefault(parameter, name)
        locality, other_locality = claim.locality, found.claims[other].locality
        if locality != other_locality:
            raise ConfigError(
                f"{other} and {name} are one tied parameter, but the plan splits it differently:"
                f" {other_locality} and {locality}. Give both modules styles with the same split."
            )
