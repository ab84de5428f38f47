"""``TeamStep``: the step of the whole tensors that the ranks of one team share."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from bmt_core.comm.annotate import annotate
from bmt_core.comm.collective_section import collective_section
from bmt_core.comm.objects import all_gather_object
from bmt_core.comm.protocols import Group
from bmt_core.errors import ConfigError
from bmt_optim.whole_tensors.option_link import merge
from bmt_optim.whole_tensors.ownership import Ownership, described
from bmt_optim.whole_tensors.transfers import FromOwner, Gathered, Scattered, ToOwner, Transfers
from bmt_optim.whole_tensors.whole_tensor import Factory, Unit, WholeTensor, explaining_memory
from bmt_params.guards.same_data import Occasions

_HAS, _LACKS, _WRITTEN, _FAILED = range(4)  # rows of the table that ranks agree on
Groups = Sequence[dict[str, Any]]


@dataclass
class _Plan:
    """One step: the tensors with gradients, those that owners must read, what the class counts."""

    groups: Groups
    scale: float
    stepped: set[WholeTensor]
    read: set[WholeTensor]
    counted: dict[int, dict[str, Any]] = field(default_factory=dict)


class TeamStep:
    """Steps the units of ``team``, of which every rank has the same ones in the same order."""

    def __init__(self, team: Group, factory: Factory, kind: str, bucket_bytes: int) -> None:
        self.team = team
        self.counted: dict[int, set[str]] = {}
        """Of each parameter group, the options that the class itself has set on this rank."""
        self._factory = factory
        self._kind = kind
        self._bucket_bytes = bucket_bytes
        self._transfers = Transfers(team)
        self._occasions = Occasions()
        self._failure: ConfigError | None = None
        self._error: Exception | None = None  # of the class, in this step
        self.set_units([], Ownership(None))

    def set_units(self, units: Sequence[Unit], ownership: Ownership) -> None:
        """Step ``units`` from now on."""
        self._tensors = [tensor for unit in units for tensor in unit.tensors]
        self._rounds = _rounds(units, self.team.size, self._bucket_bytes, ownership)

    def step(self, groups: Groups, scale: float) -> dict[int, dict[str, Any]]:
        """Take a step with the gradients divided by ``scale``. Collective over the team.

        Returns what the class has changed in each of ``groups``, for :meth:`keep_options`: other
        teams step with the options from before.
        """
        plan = self._agree(groups, scale)
        new = [tensor for tensor in self._tensors if tensor in plan.stepped and not tensor.is_met]
        self._meet(new, groups)
        rounds = [met for units in self._rounds if (met := [unit for unit in units if unit.is_met])]
        ahead = self._gather(rounds[0], plan) if rounds else None
        behind: list[Scattered] = []
        for number, units in enumerate(rounds):
            arrived = ahead
            if number + 1 < len(rounds):
                ahead = self._gather(rounds[number + 1], plan)
            assert arrived is not None
            self._compute(units, arrived, plan)
            behind.append(self._scatter(units, plan))
            if len(behind) > 1:
                behind.pop(0).wait()
        for sent in behind:
            sent.wait()
        self._raise_error(is_shared=bool(new))
        for tensor in self._tensors:
            if tensor in plan.stepped:
                torch.autograd.graph.increment_version(tensor.p)
                tensor.note_values()
        for index, options in plan.counted.items():
            self.counted.setdefault(index, set()).update(options)
        return plan.counted

    def _agree(self, groups: Groups, scale: float) -> _Plan:
        """Find out which tensors have a gradient, and which were written on any rank.
        Collective.
        """
        # Of every tensor, and at the end of none, so that a failure is told without tensors.
        has = [tensor.p.grad is not None for tensor in self._tensors]
        lacks = [
            not has_gradient and tensor.p.numel() > 0
            for tensor, has_gradient in zip(self._tensors, has, strict=True)
        ]
        was_written = [tensor.was_written for tensor in self._tensors]
        failed = self._failure is not None
        table = torch.tensor(
            [[*has, False], [*lacks, False], [*was_written, False], [failed] * (len(has) + 1)],
            dtype=torch.uint8,
            device="cpu",
        )
        with annotate("for the step of an optimizer over whole tensors"):
            self.team.all_reduce(table, "max").wait()
        if table[_FAILED].any():
            self._raise_failure()
        torn = table[_HAS] & table[_LACKS]
        if torn.any():  # the same on every rank
            raise ConfigError(
                f"{self._kind}: {described(self._tensors[int(torn.int().argmax())].p)} has a"
                f" gradient on some of the ranks {self.team.ranks} and none on others. Use it on"
                " all of them, or give it zeros, or None, on all."
            )
        columns = table[:, : len(self._tensors)].bool().tolist()
        stepped = {tensor for tensor, has in zip(self._tensors, columns[_HAS], strict=True) if has}
        written = {
            tensor
            for tensor, is_written in zip(self._tensors, columns[_WRITTEN], strict=True)
            if is_written
        }
        return _Plan(groups, scale, stepped, stepped & written)

    def _meet(self, new: Sequence[WholeTensor], groups: Groups) -> None:
        """Make the optimizers of ``new`` tensors, which have a first gradient. Collective
        if any.
        """
        if not new:
            return
        self._share_options(groups)
        for tensor in new:
            tensor.is_met = True
        with collective_section(self.team, "making whole tensors for an optimizer") as results:
            results.own = [tensor.text for tensor in new]
            for unit in [unit for units in self._rounds for unit in units]:
                if unit.is_owned and unit.is_met:
                    unit.make_optimizer(groups, self._factory)
        for other in results.of_ranks:
            different = [(a, b) for a, b in zip(results.of_ranks[0], other, strict=True) if a != b]
            if different:  # the same on every rank
                raise ConfigError(
                    f"Ranks have given {self._kind} other parameters, or in another order:"
                    f" {different[0][0]} and {different[0][1]}. Give it the same ones on all ranks."
                )
        self._transfers.connect()

    def _gather(self, units: Sequence[Unit], plan: _Plan) -> tuple[Gathered, Gathered]:
        tensors = [tensor for unit in units for tensor in unit.tensors]
        self._transfers.computation_is_done()
        values = [ToOwner(t.layout, t.owner, t.updated_part()) for t in tensors if t in plan.read]
        gradients = [
            ToOwner(t.layout, t.owner, t.gradient_part) for t in tensors if t in plan.stepped
        ]
        return self._transfers.gather(values), self._transfers.gather(gradients)

    def _compute(
        self, units: Sequence[Unit], arrived: tuple[Gathered, Gathered], plan: _Plan
    ) -> None:
        values, gradients = iter(arrived[0].wait()), iter(arrived[1].wait())
        for unit in units:
            own: list[tuple[WholeTensor, torch.Tensor | None, torch.Tensor | None]] = []
            for tensor in unit.tensors:
                value = next(values) if tensor in plan.read else None
                gradient = next(gradients) if tensor in plan.stepped else None
                if tensor.is_owned:
                    own.append((tensor, value, gradient))
            if not own:
                continue
            try:
                with explaining_memory(unit.tensors):
                    for tensor, value, gradient in own:
                        tensor.take(value, gradient, plan.scale)
                    changed = unit.step(plan.groups)
            except Exception as error:  # the other ranks still wait for values
                self._error = self._error or error
            else:
                self._collect_options(changed, plan)

    def _raise_error(self, *, is_shared: bool) -> None:
        """Raise what the class has raised in this step on this rank; if ``is_shared``, as in the
        first step of a tensor, on every rank of the team, and collective.
        """
        error, self._error = self._error, None
        with (
            collective_section(self.team, f"the step of {self._kind}")
            if is_shared
            else nullcontext()
        ):
            if error is not None:
                raise error

    def _scatter(self, units: Sequence[Unit], plan: _Plan) -> Scattered:
        tensors = [tensor for unit in units for tensor in unit.tensors if tensor in plan.stepped]
        return self._transfers.scatter(
            [FromOwner(t.layout, t.owner, t.part, t.new_values()) for t in tensors]
        )

    def _collect_options(self, changed: dict[int, dict[str, Any]], plan: _Plan) -> None:
        """Note what the class has ``changed`` in its groups; a difference is raised by
        all ranks.
        """
        for index, options in changed.items():
            try:
                merge(plan.counted.setdefault(index, {}), options, self._kind)
            except ConfigError as error:
                self.note_failure(error)

    def note_failure(self, error: ConfigError) -> None:
        """Let all ranks raise ``error``, which this one has found, when they compare
        options next.
        """
        self._failure = error

    def compare_options(self, groups: Groups) -> None:
        """Now and then compare what the class has counted, and bring it to all ranks.
        Collective then.
        """
        if self._occasions.has_come():
            self._raise_failure()
            self._share_options(groups)

    def _raise_failure(self) -> None:
        """Raise on every rank of the team if one has found a difference. Collective."""
        with collective_section(self.team, f"the step of {self._kind}"):
            if self._failure is not None:
                raise self._failure

    def _share_options(self, groups: Groups) -> None:
        """Bring what the class has counted to ranks that own no tensor of a group. Collective."""
        own = {
            index: {key: groups[index][key] for key in keys} for index, keys in self.counted.items()
        }
        found: dict[int, dict[str, Any]] = {}
        for report in all_gather_object(own, self.team):
            for index, options in report.items():  # the same on every rank, so all raise
                merge(found.setdefault(index, {}), options, self._kind)
        for index, options in found.items():
            groups[index].update(options)


def _rounds(
    units: Sequence[Unit], team_size: int, bucket_bytes: int, ownership: Ownership
) -> list[list[Unit]]:
    """Return ``units`` in rounds: of each owner at most ``bucket_bytes``, or one unit."""
    left: list[list[Unit]] = [[] for _ in range(team_size)]
    for unit in sorted(
        units, key=lambda unit: -sum(ownership.cost_of(tensor.p) for tensor in unit.tensors)
    ):
        left[unit.owner].append(unit)
    rounds: list[list[Unit]] = []
    while any(left):
        taken: list[Unit] = []
        for of_owner in left:
            nbytes = 0
            while of_owner and (nbytes == 0 or nbytes + of_owner[0].nbytes <= bucket_bytes):
                nbytes += max(1, of_owner[0].nbytes)
                taken.append(of_owner.pop(0))
        rounds.append(taken)
    return rounds
