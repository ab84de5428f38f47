"""``StepBatch``: the batch of one step of a pipeline, divided into micro-batches; and the check
that its ranks pass the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bmt_core.comm.objects import all_gather_object
from bmt_core.comm.protocols import Group
from bmt_core.errors import ConfigError
from bmt_core.run.runtime import current
from bmt_params.guards.equal_values import entries_of
from bmt_params.nested import map_tensors, tensors_in
from bmt_pipeline.batch_options import check_batch_options
from bmt_pipeline.payload import Layout, as_tuple, shapes_in
from bmt_pipeline.wait_errors import waiting_for_all


@dataclass(frozen=True, kw_only=True)
class BatchDims:
    """Which dim of which tensors is the batch: see the arguments of :func:`train_step` with
    these names.
    """

    batch_dim: int | tuple[int, int] | None = None
    batch_related: Sequence[int] | None = None

    @property
    def of_inputs(self) -> int:
        """The dim of the batch in the inputs."""
        return self.batch_dim[0] if isinstance(self.batch_dim, tuple) else self.batch_dim or 0

    @property
    def of_targets(self) -> int:
        """The dim of the batch in the targets."""
        return self.batch_dim[1] if isinstance(self.batch_dim, tuple) else self.batch_dim or 0


class StepBatch:
    """What this rank passes as ``batch``, (inputs, targets) or None; only what its stage reads
    is divided.

    Raises :class:`ConfigError` if that cannot be divided into ``micro_batches`` equal parts.
    """

    def __init__(
        self,
        batch: Any,
        dims: BatchDims,
        micro_batches: int,
        *,
        reads_inputs: bool,
        reads_targets: bool,
    ) -> None:
        check_batch_options(dims.batch_dim, dims.batch_related)
        self._passed = (None, None) if batch is None else _as_pair(batch)
        inputs, targets = self._passed
        self.inputs: list[tuple[Any, ...]] = []
        """The positional arguments of ``before_layers``, by micro-batch; empty if this stage does
        not read them.
        """
        self.targets: list[Any] = []
        """The targets, by micro-batch; empty if this stage does not read them."""
        self.all_targets = targets
        self._dims = dims
        if reads_inputs:
            self.inputs = _micro_batches(
                as_tuple(inputs), dims.batch_related, dims.of_inputs, micro_batches, "inputs"
            )
        if reads_targets:
            parts = _micro_batches((targets,), None, dims.of_targets, micro_batches, "targets")
            self.targets = [target for (target,) in parts]

    def text(self) -> str:
        """Return a text of the shapes of a micro-batch, as far as this stage reads it."""
        parts = {"inputs": self.inputs, "targets": self.targets}
        return "\n".join(Layout(part[0], name).text for name, part in parts.items() if part)

    def check_rows(self, hidden: Any, dim: int) -> None:
        """Raise :class:`ConfigError` if ``hidden``, made of the first micro-batch, may have another
        batch as ``dim``.

        Only if ``dim`` is not 0, so that hidden states are sequence first, and the inputs may be,
        too, and nobody has said so.
        """
        is_declared = self._dims.batch_dim is not None
        if dim == 0 or is_declared or not isinstance(hidden, torch.Tensor) or hidden.dim() <= dim:
            return
        related = self._dims.batch_related
        first, *_ = tensors_in(
            [x for number, x in enumerate(self.inputs[0]) if related is None or number in related]
        )
        rows, found = first.shape[0], hidden.shape[dim]
        could_be_dim = first.dim() > dim and first.shape[dim] == found
        if found != rows or could_be_dim:
            raise ConfigError(
                f"before_layers made hidden states of shape {tuple(hidden.shape)}, with the batch"
                f" as dim {dim}, of a micro-batch with {rows} rows along dim 0 of inputs of shape"
                f" {tuple(first.shape)}. Say which dim of the inputs and targets is the batch,"
                f" along which they are divided: train_step(..., batch_dim={dim}) if they are"
                " sequence first, too, else batch_dim=0."
            )

    def check_is_same_on_all_stages(self, group: Group, last_stage: int) -> None:
        """Raise :class:`ConfigError` on all ranks of the pipeline ``group`` if one passes another
        batch than is computed with.

        Collective, and waits for the device. A rank that passes None, or nothing with a tensor in
        it, passes no other batch.
        """
        with waiting_for_all("to compare the batches of this pipeline's ranks"):
            own = [entries_of(("", x) for x in tensors_in(part)) for part in self._passed]
            of_ranks = all_gather_object(own, group)
        for index, what, source in ((0, "inputs", 0), (1, "targets", last_stage)):
            wanted = of_ranks[source][index]
            others = [
                rank
                for rank, own in zip(group.ranks, of_ranks, strict=True)
                if own[index] not in ([], wanted)
            ]
            if others:
                replicas = ""
                if current().topology.axis_size("replica") > 1:
                    replicas = (
                        " (with shard_size: axis_size('replica') * axis_size('dp') and"
                        " axis_rank('replica') * axis_size('dp') + axis_rank('dp'))"
                    )
                raise ConfigError(
                    f"Rank {others[0]} passes other {what} than rank {group.ranks[source]}, and"
                    " both are stages of one pipeline, which computes with those of rank"
                    f" {group.ranks[source]}. One batch belongs to a whole pipeline: pass the same"
                    " one on all its ranks, with DistributedSampler(data,"
                    " num_replicas=topology.axis_size('dp'), rank=topology.axis_rank('dp'))"
                    f"{replicas}, where topology is bmt_core.current().topology. Ranks that do not"
                    " read the inputs or the targets may pass None instead."
                )


def _as_pair(batch: Any) -> tuple[Any, Any]:
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        raise ConfigError(f"The batch of a step is (inputs, targets), not {_kind(batch)}.")
    return batch[0], batch[1]


def _kind(batch: Any) -> str:
    name = type(batch).__name__
    return f"a {name} of {len(batch)}" if isinstance(batch, (tuple, list)) else name


def _micro_batches(
    values: tuple[Any, ...], related: Sequence[int] | None, dim: int, count: int, what: str
) -> list[tuple[Any, ...]]:
    """Divide the ``related`` ones of ``values``, by default all, along ``dim``. Every micro-batch
    gets the others whole.
    """
    numbers = range(len(values))
    wrong = [number for number in related or () if number not in numbers]
    if wrong:
        raise ConfigError(
            f"batch_related names {wrong[0]!r}, and a step has {len(values)} {what}: give their"
            " numbers, counted from 0."
        )
    are_divided = [related is None or number in related for number in numbers]
    divided = _divided(
        [value for number, value in enumerate(values) if are_divided[number]], dim, count, what
    )
    whole = map_tensors(torch.Tensor.detach, values)
    made = []
    for part in divided:
        own = iter(part)
        made.append(
            tuple(next(own) if are_divided[number] else whole[number] for number in numbers)
        )
    return made


def _divided(values: list[Any], dim: int, count: int, what: str) -> list[list[Any]]:
    """Return ``count`` equal parts of ``values``, whose tensors all have the batch as
    dim ``dim``.
    """
    tensors = tensors_in(values)
    if not tensors:
        raise ConfigError(
            f"This stage needs the {what} of the batch, and got none: pass (inputs, targets)."
        )
    sizes = [tensor.shape[dim] if tensor.dim() > dim else None for tensor in tensors]
    rows = sizes[0]
    if rows is None or any(size != rows for size in sizes):
        raise ConfigError(
            f"All tensors in the {what} must have the batch as dim {dim}, with the same size, but"
            f" these are {shapes_in(values)}. If the batch is another dim, give batch_dim. If an"
            " input is no part of the batch, name the others in batch_related."
        )
    if rows == 0 or rows % count:
        raise ConfigError(
            f"The {what} have {rows} rows, which cannot be divided into num_micro_batches={count}"
            " equal parts. Change the batch or num_micro_batches."
        )
    parts = [iter(tensor.detach().chunk(count, dim)) for tensor in tensors]
    made = []
    for _ in range(count):
        own = iter([next(part).contiguous() for part in parts])
        made.append(map_tensors(lambda _, own=own: next(own), values))  # type: ignore[misc]
    return made
