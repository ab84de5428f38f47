"""Axes that break one rule of the conformance kit each, and a plugin that offers them."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from wrong_plugins import Named

from bmt_core.plugins.hookspecs import hookimpl
from bmt_core.plugins.protocols import Run
from bmt_core.settings import MeshAxis, RunSettings


class Right(Named):
    """An axis whose ranks see different data. Breaks no rule."""

    breaks = ""
    order = 80
    shards_data = True

    def size(self, config: RunSettings) -> int:
        return config.axis_sizes.get(self.name, 1)

    def axis(self, config: RunSettings) -> MeshAxis:
        return MeshAxis(self.name, self.size(config), self.order, shards_data=self.shards_data)

    def started(self, runtime: Run) -> None:
        pass

    def stopping(self) -> None:
        pass


class RightOfTheSameData(Right):
    """Breaks no rule."""

    breaks = ""
    order = 20
    shards_data = False


class PowersOfTwo(Right):
    """Rounds the size up."""

    breaks = "it_has_the_size_that_is_asked_for"

    def size(self, config: RunSettings) -> int:
        return 1 << (super().size(config) - 1).bit_length()


class AlwaysThere(Right):
    """Has two ranks in a run that asks for no axis."""

    breaks = "it_is_not_there_unless_it_is_asked_for"

    def size(self, config: RunSettings) -> int:
        return super().size(config) if config.axis_sizes else 2


class InnermostIfSmall(Right):
    """Lies elsewhere at other sizes."""

    breaks = "it_is_the_same_axis_at_every_size"

    def axis(self, config: RunSettings) -> MeshAxis:
        size = self.size(config)
        return MeshAxis(self.name, size, 80 if size <= 2 else 10)


# These two answer wrongly to a set alone. bmt itself asks by other collections: with these answers
# it would neither train nor load.


class OneRowOfRanks(Right):
    """Answers that all ranks lie along it."""

    breaks = "ranks_lie_in_the_grid_as_its_order_says"

    def started(self, runtime: Run) -> None:
        topology: Any = runtime.topology
        usual, all_ranks = topology.ranks, tuple(range(topology.world_size))
        topology.ranks = lambda axes: [all_ranks] if type(axes) is set else usual(axes)


class OneGroupForAll(Right):
    """Answers with the group of all ranks."""

    breaks = "every_rank_has_one_group_along_it"

    def started(self, runtime: Run) -> None:
        topology: Any = runtime.topology
        usual, world = topology.group, runtime.world
        topology.group = lambda axes: world if type(axes) is set else usual(axes)


class DividesItself(Right):
    """Divides the world by its size before bmt does."""

    breaks = "a_world_that_its_size_does_not_divide_is_refused_on_every_rank"

    def size(self, config: RunSettings) -> int:
        size = super().size(config)
        if int(os.environ.get("WORLD_SIZE", size)) % size:
            raise ValueError("The number of ranks does not fit.")
        return size


class DividesAgain(Right):
    """Averages gradients along it, which are averages already."""

    breaks = "ranks_train_as_one_process_in_plain_torch"
    handle: Any = None

    def started(self, runtime: Run) -> None:
        self.handle = register_optimizer_step_pre_hook(self.divide)

    def divide(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for param in (p for group in optimizer.param_groups for p in group["params"]):
            if param.grad is not None:
                param.grad /= 2

    def stopping(self) -> None:
        self.handle.remove()


class SeedsItsRanks(RightOfTheSameData):
    """Gives each rank along it random numbers of its own, though all see the same data."""

    breaks = "ranks_that_compute_the_same_rows_draw_the_same_dropout"

    def started(self, runtime: Run) -> None:
        topology: Any = runtime.topology
        torch.manual_seed(topology.axis_rank(self.name))


class TableForTwo(Right):
    """Has a table of what each rank along it does, for one or two."""

    breaks = "what_one_size_saves_another_loads"

    def started(self, runtime: Run) -> None:
        topology: Any = runtime.topology
        if topology.axis_size("dp") == 1 and topology.world_size > 2:
            assert topology.axis_rank(self.name) < 2


WRONG = Right.plugins
_axes = [kind() for kind in WRONG]
_started: list[Right] = []


@hookimpl
def bmt_mesh_axes(config: RunSettings) -> list[MeshAxis]:
    """Return the axes whose plugins would be installed alone."""
    found = [each for each in _axes if each.name in config.axis_sizes or not config.axis_sizes]
    return [axis for each in found if (axis := each.axis(config)).size > 1]


@hookimpl
def bmt_run_started(runtime: Run) -> None:
    topology: Any = runtime.topology
    _started[:] = [each for each in _axes if topology.axis_size(each.name) > 1]
    for each in _started:
        each.started(runtime)


@hookimpl
def bmt_run_stopping() -> None:
    while _started:
        _started.pop().stopping()
