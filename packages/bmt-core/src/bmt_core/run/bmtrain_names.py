"""BMTrain's names and arguments for tensor parallelism, which is the axis ``tp`` here, and for pipelines, the axis ``pp``.

Nothing else in core, zero and optim knows these two axes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Literal

import torch

from bmt_core.errors import ConfigError, unknown_name
from bmt_core.packages import PACKAGES
from bmt_core.run.locality import Locality
from bmt_core.settings import MeshAxis, RunSettings

TENSOR_AXIS = "tp"
PIPELINE_AXIS = "pp"
BlockMode = Literal["BLOCK", "PIPE"]

# Axis -> the argument of init_distributed() that asks for it, and the package that provides it.
_ARGUMENTS = {TENSOR_AXIS: ("tp_size", "bmt-tp"), PIPELINE_AXIS: ("pipe_size", "bmt-pipeline")}


def argument_for(axis: str) -> str:
    """Return the setting that changes the size of ``axis``, as error messages name it.

    >>> argument_for("tp"), argument_for("expert")
    ('tp_size', "the size of 'expert'")
    """
    return _ARGUMENTS[axis][0] if axis in _ARGUMENTS else f"the size of {axis!r}"


def how_to_declare_whole(axis: str) -> str:
    """Return the call, for errors, that declares that each rank along ``axis`` computes a module whole.

    >>> how_to_declare_whole("tp"), how_to_declare_whole("expert")
    ('bmt_tp.whole(module)', "set_locality(module, Locality('expert', gradients='whole'))")
    """
    if axis == TENSOR_AXIS:
        return "bmt_tp.whole(module)"
    return f"set_locality(module, Locality({axis!r}, gradients='whole'))"


def how_to_split(axis: str) -> str:
    """Return the call, for errors, that splits a model over the ranks along ``axis``.

    >>> how_to_split("tp"), how_to_split("expert")
    ('bmt_tp.parallelize(model)', "parameters with Locality('expert', split_dim=...)")
    """
    return "bmt_tp.parallelize(model)" if axis == TENSOR_AXIS else f"parameters with Locality({axis!r}, split_dim=...)"


def settings_of_all_axes() -> RunSettings:
    """Return settings that ask for every axis with an argument, to find out which of these axes plugins provide."""
    return RunSettings(tp_size=2, pipe_size=2)


def check_axes_are_provided(settings: RunSettings, axes: Iterable[MeshAxis]) -> None:
    """Raise :class:`ConfigError` if ``tp_size`` or ``pipe_size`` asks for an axis that is not among ``axes``.

    The sizes of these two have no other argument.
    """
    provided = {axis.name for axis in axes}
    for name, (argument, package) in _ARGUMENTS.items():
        if name in settings.axis_sizes:
            raise ConfigError(
                f"The size of the axis {name!r} is the argument {argument}: pass it there, not in axis_sizes."
            )
        size = getattr(settings, argument)
        if size > 1 and name not in provided:
            raise ConfigError(
                f"{argument}={size} needs the axis {name!r}, which no active plugin provides. "
                f"Install {package}: {PACKAGES[package].install}; or leave {argument} at its default, or add a plugin"
                " whose hook bmt_mesh_axes provides the axis."
            )


def tensor_locality(tp_mode: bool, tp_split_dim: int) -> tuple[Locality, ...]:
    """Return the localities that ``tp_mode`` and ``tp_split_dim`` stand for.

    With ``tp_split_dim=-1`` each rank's gradient is a share: BMTrain sums the gradients of such a parameter over tp.

    >>> tensor_locality(True, 0)
    (Locality(axis='tp', split_dim=0, ...),)
    >>> tensor_locality(True, -1)
    (Locality(axis='tp', split_dim=None, gradients='share', ...),)
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
    """The attributes of BMTrain's topology, for rank r. With S = world size // pp, the number of ranks in a stage::

        stages      pp                           number of pipeline stages
        pipe_idx    r % S                        which pipeline the rank is in
        stage_id    r // S                       which stage of its pipeline it is
        tp_idx      r // tp                      which tensor-parallel group it is in
        tp_id       r % tp                       its index in that group

    For four more kinds of groups, ``…_idx`` is the number of the rank's group, and ``…_id`` the rank's index in it: ``zero``, all
    ranks; ``tp_zero``, the ranks with the same tensor-parallel slices; ``pp_zero``, the ranks of one stage; ``pp_tp_zero``,
    the ranks of one stage with the same slices.
    """

    rank: int
    world_size: int

    def axis_size(self, axis: str) -> int:
        """Size of ``axis``."""
        raise NotImplementedError

    stages = property(lambda self: self.axis_size(PIPELINE_AXIS))
    pipe_idx = property(lambda self: self.rank % (self.world_size // self.stages))
    stage_id = property(lambda self: self.rank // (self.world_size // self.stages))
    tp_idx = property(lambda self: self.rank // self.axis_size(TENSOR_AXIS))
    tp_id = property(lambda self: self.rank % self.axis_size(TENSOR_AXIS))
    zero_idx = 0
    zero_id = property(lambda self: self.rank)
    tp_zero_idx, tp_zero_id = tp_id, tp_idx
    pp_zero_idx, pp_zero_id = stage_id, pipe_idx
    pp_tp_zero_idx = property(lambda self: self.stage_id * self.axis_size(TENSOR_AXIS) + self.tp_id)
    pp_tp_zero_id = property(lambda self: self.pipe_idx // self.axis_size(TENSOR_AXIS))

    def get_group_id(self, name: str) -> int:
        """The number of this rank's group of kind ``name`` (``pipe zero tp_zero tp``), as BMTrain numbers them."""
        return self._attribute(name, 0)

    def get_group_rank(self, name: str) -> int:
        """The rank's index in its group of kind ``name`` (``pipe zero tp_zero tp``)."""
        return self._attribute(name, 1)

    def _attribute(self, group: str, which: int) -> int:
        if group not in _GROUPS:
            raise ConfigError(unknown_name("group", group, _GROUPS))
        value: int = getattr(self, _GROUPS[group][which])
        return value


# Name of a group -> the attributes with the group's number, and with the rank's index in it.
_GROUPS = {
    "pipe": ("pipe_idx", "stage_id"),
    "zero": ("zero_idx", "zero_id"),
    "tp_zero": ("tp_zero_idx", "tp_zero_id"),
    "tp": ("tp_idx", "tp_id"),
}


class OldParameterNames:
    """Attributes of BMTrain's DistributedParameter that have other names in bmt, or are not needed there."""

    __slots__ = ()

    locality: tuple[Locality, ...]

    @property
    def whole_shape(self) -> torch.Size:
        """Shape of the whole tensor."""
        raise NotImplementedError

    def gather_all(self) -> torch.Tensor:
        """Return the whole tensor. Collective."""
        raise NotImplementedError

    def local_part(self, full: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a whole tensor."""
        raise NotImplementedError

    def _copy_data(self, data: torch.Tensor) -> None:
        """Copy this rank's part of ``data``, a tensor of ``full_shape``, to the parameter. Communicates nothing."""
        shape: torch.Size = self._original_shape  # type: ignore[attr-defined]
        self.data.copy_(self.local_part(data.detach().view(shape)))  # type: ignore[attr-defined]

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
