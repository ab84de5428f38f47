"""BMTrain's names for the rank grid, mapped to axes. Nothing else in core, zero and optim knows the axes ``tp`` and ``pp``.

BMTrain has two kinds of parallelism besides data parallelism, and names of its own for each: tensor parallelism is the axis
``tp``, pipelines are the axis ``pp``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Literal

import torch

from bmt_core.errors import ConfigError
from bmt_core.run.locality import Locality
from bmt_core.settings import MeshAxis, RunSettings

TENSOR_AXIS = "tp"
PIPELINE_AXIS = "pp"
BlockMode = Literal["BLOCK", "PIPE"]

# Axis -> the argument of init_distributed() that asks for it, and what to say of the package that brings it.
_ARGUMENTS = {
    TENSOR_AXIS: (
        "tp_size",
        'Install bmt-tp: pip install "bmt-train[tp]", or from a clone: pip install ./packages/bmt-core ./packages/bmt-tp; or',
    ),
    PIPELINE_AXIS: ("pipe_size", "The package for it, bmt-pipeline, does not exist yet:"),
}


def argument_for(axis: str) -> str:
    """Return in words what a user changes to change the size of ``axis``.

    >>> argument_for("tp"), argument_for("expert")
    ('tp_size', "the size of 'expert'")
    """
    return _ARGUMENTS[axis][0] if axis in _ARGUMENTS else f"the size of {axis!r}"


def settings_of_all_axes() -> RunSettings:
    """Return settings that ask for every axis that has an argument, to find out which of them plugins bring."""
    return RunSettings(tp_size=2, pipe_size=2)


def check_axes_are_provided(settings: RunSettings, axes: Iterable[MeshAxis]) -> None:
    """Raise :class:`ConfigError` if ``tp_size`` or ``pipe_size`` asks for an axis that is not among ``axes``."""
    provided = {axis.name for axis in axes}
    for name, (argument, advice) in _ARGUMENTS.items():
        size = getattr(settings, argument)
        if size > 1 and name not in provided:
            raise ConfigError(
                f"{argument}={size} needs the axis {name!r}, which no active plugin provides. "
                f"{advice} leave {argument} at its default, or add a plugin whose hook bmt_mesh_axes brings the axis."
            )


def tensor_locality(tp_mode: bool, tp_split_dim: int) -> tuple[Locality, ...]:
    """Return what ``tp_mode`` and ``tp_split_dim`` say of a parameter.

    BMTrain sums the gradients of parameters that are replicated over tp (``tp_split_dim=-1``): each rank has a share.

    >>> tensor_locality(True, 0)
    (Locality(axis='tp', split_dim=0, gradients=None),)
    >>> tensor_locality(True, -1)
    (Locality(axis='tp', split_dim=None, gradients='share'),)
    """
    if not tp_mode:
        return ()
    if tp_split_dim < 0:
        return (Locality(TENSOR_AXIS, gradients="share"),)
    return (Locality(TENSOR_AXIS, split_dim=tp_split_dim),)


def axes_of_mode(mode: BlockMode) -> tuple[str, ...]:
    """Return the axes along which a Block of ``mode`` is local: a ``"PIPE"`` block lives in one stage of a pipeline.

    >>> axes_of_mode("PIPE"), axes_of_mode("BLOCK")
    (('pp',), ())
    """
    if mode not in ("BLOCK", "PIPE"):
        raise ConfigError(f"mode must be 'BLOCK' or 'PIPE', not {mode!r}.")
    return (PIPELINE_AXIS,) if mode == "PIPE" else ()


def mode_of_axes(local_axes: Collection[str]) -> BlockMode:
    """Return BMTrain's mode of a Block that is local along ``local_axes``."""
    return "PIPE" if PIPELINE_AXIS in local_axes else "BLOCK"


class OldTopologyNames:
    """The attributes of BMTrain's topology, with S = world size // pp."""

    rank: int
    world_size: int

    def axis_size(self, axis: str) -> int:
        """Size of ``axis``."""
        raise NotImplementedError

    @property
    def stages(self) -> int:
        """Number of pipeline stages."""
        return self.axis_size(PIPELINE_AXIS)

    @property
    def pipe_idx(self) -> int:
        """Which pipeline this rank is in: rank % S."""
        return self.rank % (self.world_size // self.stages)

    @property
    def stage_id(self) -> int:
        """Which stage of its pipeline this rank is: rank // S."""
        return self.rank // (self.world_size // self.stages)

    @property
    def tp_id(self) -> int:
        """The rank's index in its tensor-parallel group: rank % tp."""
        return self.rank % self.axis_size(TENSOR_AXIS)

    @property
    def tp_idx(self) -> int:
        """Which tensor-parallel group this rank is in: rank // tp."""
        return self.rank // self.axis_size(TENSOR_AXIS)

    @property
    def zero_idx(self) -> int:
        """Which group of all ranks this rank is in: there is one, 0."""
        return 0

    @property
    def zero_id(self) -> int:
        """The rank's index among all."""
        return self.rank

    @property
    def tp_zero_idx(self) -> int:
        """Which group of ranks with the same tensor-parallel slices this rank is in."""
        return self.tp_id

    @property
    def tp_zero_id(self) -> int:
        """The rank's index among those with the same tensor-parallel slices."""
        return self.tp_idx

    @property
    def pp_zero_idx(self) -> int:
        """Which group of the ranks of one stage this rank is in."""
        return self.stage_id

    @property
    def pp_zero_id(self) -> int:
        """The rank's index among the ranks of its stage."""
        return self.pipe_idx

    @property
    def pp_tp_zero_idx(self) -> int:
        """Which group of ranks of one stage with the same tensor-parallel slices this rank is in."""
        return self.stage_id * self.axis_size(TENSOR_AXIS) + self.tp_id

    @property
    def pp_tp_zero_id(self) -> int:
        """The rank's index among those of its stage with the same tensor-parallel slices."""
        return self.pipe_idx // self.axis_size(TENSOR_AXIS)

    def get_group_id(self, name: str) -> int:
        """Which of the groups called ``name`` (``pipe zero tp_zero tp``) this rank is in, under BMTrain's numbering."""
        return self._old({"pipe": "pipe_idx", "zero": "zero_idx", "tp_zero": "tp_zero_idx", "tp": "tp_idx"}, name)

    def get_group_rank(self, name: str) -> int:
        """The rank's index inside its group called ``name`` (``pipe zero tp_zero tp``)."""
        return self._old({"pipe": "stage_id", "zero": "zero_id", "tp_zero": "tp_zero_id", "tp": "tp_id"}, name)

    def _old(self, attributes: dict[str, str], name: str) -> int:
        if name not in attributes:
            raise ConfigError(f"No group is named {name!r}. Known: {', '.join(attributes)}.")
        value: int = getattr(self, attributes[name])
        return value


class OldParameterNames:
    """The attributes of BMTrain's DistributedParameter that are about tensor parallelism."""

    __slots__ = ()

    locality: tuple[Locality, ...]

    @property
    def whole_shape(self) -> torch.Size:
        """Shape of the tensor that ranks have slices of."""
        raise NotImplementedError

    def gather_all(self) -> torch.Tensor:
        """Return the whole tensor. Collective."""
        raise NotImplementedError

    def tp_gather(self) -> torch.Tensor:
        """BMTrain's other name of :meth:`gather_all`."""
        return self.gather_all()

    @property
    def _tp_mode(self) -> bool:
        return any(place.axis == TENSOR_AXIS for place in self.locality)

    @property
    def _tp_split_dim(self) -> int:
        found = [place.split_dim for place in self.locality if place.axis == TENSOR_AXIS]
        return -1 if not found or found[0] is None else found[0]

    @property
    def _tp_original_shape(self) -> torch.Size:
        return self.whole_shape
