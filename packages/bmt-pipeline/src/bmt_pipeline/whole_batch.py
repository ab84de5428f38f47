"""``WholeBatch``: the arguments of all ranks of a pipeline, on its first stage, divided
into micro-batches.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch

from bmt_core.comm.protocols import Group
from bmt_core.errors import ConfigError
from bmt_params.nested import map_tensors, tensors_in
from bmt_pipeline.batch_rows import move_rows
from bmt_pipeline.pipeline_ranks import own_stage


class Arguments(NamedTuple):
    """The arguments of a list of layers: hidden states, other positional arguments,
    keyword arguments.
    """

    hidden: tuple[Any, ...]
    rest: tuple[Any, ...]
    kwargs: dict[str, Any]


class BatchShape(NamedTuple):
    """The batch dim of each tensor in :class:`Arguments`, and the division of the batch.

    ``batch_dims``: per tensor, the dim of the batch, or None for a tensor that all rows share.
    ``rows``: the rows of one rank.
    """

    rows: int
    ranks: int
    micro_batches: int
    batch_dims: tuple[int | None, ...]

    @classmethod
    def of(
        cls,
        arguments: Arguments,
        ranks: int,
        micro_batches: int,
        batch_dim: int,
        related: Collection[int | str] | None,
    ) -> BatchShape:
        """Return the shape of ``arguments``. For ``batch_dim`` and ``related`` see
        :class:`PipelineTransformerBlockList`.
        """
        first = arguments.hidden[0]
        if not isinstance(first, torch.Tensor) or first.dim() <= batch_dim:
            raise ConfigError(
                f"The first hidden state must be a tensor with the batch as dim {batch_dim}, not"
                f" {_name(first)}. Pass the hidden states first, and set batch_dim of the list."
            )
        rows = first.shape[batch_dim]
        dims: list[int | None] = [batch_dim for _ in tensors_in(arguments.hidden)]
        if any(
            tensor.dim() <= batch_dim or tensor.shape[batch_dim] != rows
            for tensor in tensors_in(arguments.hidden)
        ):
            raise ConfigError(
                f"All hidden states must have the batch as dim {batch_dim}, with {rows} rows as the"
                " first one has; shapes are"
                f" {[tuple(tensor.shape) for tensor in tensors_in(arguments.hidden)]}. Set"
                " num_hidden and batch_dim to fit."
            )
        dims += _dims_of_others(arguments, rows, related)
        if rows * ranks % micro_batches:
            raise ConfigError(
                f"The {ranks} ranks of a pipeline pass {rows} rows each, {rows * ranks} together,"
                f" which cannot be divided into num_micro_batches={micro_batches} equal parts."
                " Change the batch or num_micro_batches."
            )
        return cls(rows, ranks, micro_batches, tuple(dims))

    @property
    def rows_of_micro_batch(self) -> int:
        """Number of rows in a micro-batch."""
        return self.rows * self.ranks // self.micro_batches


class WholeBatch:
    """The arguments of all ranks on the first stage, concatenated along dim 0 by rank; tensors with
    0 rows on the other stages.

    Making it is collective over the pipeline ``group``, and so is the backward of its tensors.
    """

    def __init__(self, arguments: Arguments, shape: BatchShape, group: Group) -> None:
        self.arguments = arguments
        self.shape = shape
        is_first = own_stage() == 0
        self.tensors: list[torch.Tensor] = []
        for tensor, dim in zip(tensors_in(arguments), shape.batch_dims, strict=True):
            rows = tensor[None] if dim is None else tensor.movedim(dim, 0)
            sent = [len(rows), *[0] * (group.size - 1)]
            received = [len(rows) if is_first else 0] * group.size
            self.tensors.append(move_rows(rows, sent, received, group))

    def micro_batch(self, tensors: Sequence[torch.Tensor], number: int) -> Arguments:
        """Return the arguments of micro-batch ``number``, sliced from ``tensors``, which have the
        shapes of :attr:`tensors`.
        """
        own = [
            self._cut(tensor, dim, number)
            for tensor, dim in zip(tensors, self.shape.batch_dims, strict=True)
        ]
        remaining = iter(own)
        arguments: Arguments = map_tensors(lambda _: next(remaining), self.arguments)
        return arguments

    def rows_of(self, number: int) -> slice:
        """Return the rows of the whole batch that form micro-batch ``number``."""
        length = self.shape.rows_of_micro_batch
        return slice(number * length, (number + 1) * length)

    def ranks_of(self, number: int) -> range:
        """Return the ranks of the pipeline whose rows are in micro-batch ``number``."""
        rows = self.rows_of(number)
        return range(rows.start // self.shape.rows, (rows.stop - 1) // self.shape.rows + 1)

    def _cut(self, tensor: torch.Tensor, dim: int | None, number: int) -> torch.Tensor:
        if dim is not None:
            return tensor[self.rows_of(number)].movedim(0, dim).contiguous()
        ranks = self.ranks_of(number)
        first = tensor[ranks.start]
        if any(not torch.equal(first, tensor[rank]) for rank in ranks[1:]):
            raise ConfigError(
                f"Micro-batch {number} has rows of several ranks, {list(ranks)} of the pipeline,"
                f" and they pass different values of an argument of shape {tuple(first.shape)},"
                " whose dim 0 is not the batch. Choose num_micro_batches as a multiple of"
                f" pipe_size={self.shape.ranks}, or give the argument the batch as dim 0."
            )
        return first.clone()  # a layer may write to it, and other micro-batches get it too


def _dims_of_others(
    arguments: Arguments, rows: int, related: Collection[int | str] | None
) -> list[int | None]:
    """Return the batch dim, 0 or None, of each tensor in the arguments after the hidden states;
    None ``related``: by size.
    """
    others: list[tuple[int | str, Any]] = [*enumerate(arguments.rest), *arguments.kwargs.items()]
    names = [name for name, _ in others]
    wrong = [name for name in related or () if name not in names]
    if wrong:
        raise ConfigError(
            f"batch_related names {wrong[0]!r}, and the arguments after the hidden states are"
            f" {names}. Give the number of a positional argument, counted from 0, or the name of a"
            " keyword argument; pass None for one that is not used."
        )
    dims: list[int | None] = []
    for name, argument in others:
        for tensor in tensors_in(argument):
            is_of_batch = _has_rows(tensor, rows) if related is None else name in related
            if is_of_batch and not _has_rows(tensor, rows):
                raise ConfigError(
                    f"batch_related names argument {name!r} after the hidden states, whose shape is"
                    f" {tuple(tensor.shape)}: its dim 0 must be the batch, which has {rows} rows."
                )
            dims.append(0 if is_of_batch else None)
    return dims


def _has_rows(tensor: torch.Tensor, rows: int) -> bool:
    return tensor.dim() > 0 and tensor.shape[0] == rows


def _name(value: object) -> str:
    return (
        f"one of shape {tuple(value.shape)}"
        if isinstance(value, torch.Tensor)
        else type(value).__name__
    )
