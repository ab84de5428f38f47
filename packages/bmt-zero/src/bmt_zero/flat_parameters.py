"""``FlatParameters``: parameters of one dtype in one flat tensor, and this rank's shard of
that tensor.

:class:`RankMajorParameters` are laid out otherwise: each was sharded alone before, and keeps
its part. A :class:`SecondaryShard` is what parameters are gathered from with
``optimizer_shards="all"``.

[Note: two stages] N ranks see different data, and S of them are of one ``shard_size``. Each rank
has 1/N of a Block's parameters, gradients and optimizer states. After each change of the values,
and after each backward pass that has reduced gradients outside of ``no_sync``, because a change
usually follows it, it gathers its secondary shard, 1/S of the parameters, from the N/S ranks at its
place among others (``across``). Blocks are gathered from secondary shards, among S ranks
(``inside``). Gradients go the other way: they are reduced to 1/S inside, and then to 1/N across.

So slices that lie together in a secondary shard belong to ranks that are S apart: the rank at
place i inside, and at place j across, has slice i * N/S + j of the flat tensor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import torch

from bmt_core.comm import Group, Work
from bmt_core.comm.protocols import Finished
from bmt_core.run.runtime import current
from bmt_core.run.topology import REPLICA_AXIS
from bmt_core.torch_internals import set_data, unflatten
from bmt_params.make_distributed import make_distributed
from bmt_params.parameter import DistributedParameter, note_first_values
from bmt_params.shard import Shard
from bmt_params.uninitialized import has_values
from bmt_zero.flat_layout import flat_layout
from bmt_zero.param_dtype import gather_in_dtype


class FlatParameters:
    """Parameters of one dtype, back to back in one flat tensor; each rank of ``process_group``
    keeps an equal slice of it.

    If ``is_replicated`` (ZeRO level 0, or a group of one rank), every rank keeps the whole flat
    tensor. ``replicas`` are the ranks with the same slice. With ``secondary`` it is gathered in two
    stages. The parameters become
    :class:`DistributedParameter` and stay the same objects. Making the group is collective if one
    of them was sharded differently before.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        *,
        process_group: Group,
        replicas: Group | None,
        replicated: bool,
        device: torch.device,
        secondary: SecondaryShard | None = None,
        compute_dtype: torch.dtype | None = None,
    ) -> None:
        self.process_group = process_group
        self.replicas = replicas
        self.is_replicated = replicated or process_group.size == 1
        self.secondary = secondary
        self.gathers_copies = secondary is not None
        """Whether gathers read copies of the shard, made once a version."""
        self.version = 0
        """Grows, on all ranks alike, with each change of the values, and where one is expected. A
        copy of another version is outdated.
        """
        self.dtype = parameters[0].dtype
        self.compute_dtype = compute_dtype or self.dtype
        """Of the whole parameters and of their gradients: see [Note: compute dtypes]."""
        self.gathered_dtype = self.compute_dtype
        self.is_gathered = not self.is_replicated or self.compute_dtype != self.dtype
        """Whether the whole parameters have memory of their own. If not, they are the shard."""
        self.device = device
        self.shapes = [
            p.full_shape if isinstance(p, DistributedParameter) else p.shape for p in parameters
        ]
        # The lengths of the shard's pieces, and for each parameter the index of its piece.
        self.pieces, self.indices = self._lay_out(parameters)
        self.shard = torch.zeros(sum(self.pieces), dtype=self.dtype, device=device)
        self.total = self.shard.numel() * (1 if self.is_replicated else process_group.size)
        # Of the gathered parameters, padding included.
        self.full_bytes = self.total * self.gathered_dtype.itemsize
        self._gathered: torch.Tensor | None = None
        self._whole: list[torch.Tensor] = []  # its views
        parts = torch.split(self.shard, self.pieces)
        with torch.no_grad():
            self.parameters = [
                self._adopt(parameter, number, parts[index])
                for number, (parameter, index) in enumerate(
                    zip(parameters, self.indices, strict=True)
                )
            ]

    @property
    def labels(self) -> str:
        """The parameters' common name for errors."""
        first, *others = (parameter.label or "a parameter" for parameter in self.parameters)
        return f"{first} and {len(others)} others" if others else first

    def gather(self, output: torch.Tensor) -> Work:
        """Start to fill ``output`` with the shards of all ranks, or their secondary shards.
        Collective.
        """
        if self.secondary is not None:
            return self.secondary.gather(output)
        if self.is_replicated:
            output.copy_(self.shard)  # a cast
            return Finished()
        if self.gathered_dtype == self.dtype:
            return self.process_group.all_gather(output, self.shard)
        return gather_in_dtype(self.process_group, self.shard, output)

    def refresh_secondary(self) -> Work:
        """Gather the secondary shard. Collective."""
        assert self.secondary is not None
        return self.secondary.refresh(self.shard, self.gathered_dtype)

    def whole_of(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return the whole parameters for the modules: new views of ``flat``, the result of the
        gather, at each call.
        """
        if self._gathered is not flat:
            views = self.views_of(flat)
            if type(flat) not in map(type, views):  # FakeTensorMode makes others: not kept
                return views
            self._gathered, self._whole = flat, views
        return [view.view_as(view) for view in self._whole]  # sooner than made anew

    def views_of(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return the parameters in ``flat``, a flat tensor of this layout, in their shapes: new
        views at each call.
        """
        return self.views_and_gaps_of(flat)[0]

    def views_and_gaps_of(
        self, flat: torch.Tensor
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return :meth:`views_of` ``flat``, and the padding between them."""
        pieces = unflatten(flat, self._like)
        return [pieces[index] for index in self._full_indices], [
            pieces[index] for index in self._gaps
        ]

    def _lay_out(self, parameters: Sequence[torch.nn.Parameter]) -> tuple[list[int], list[int]]:
        numels = [shape.numel() for shape in self.shapes]
        self._layout = flat_layout(
            numels,
            min(self.dtype.itemsize, self.compute_dtype.itemsize),  # aligned in both dtypes
            1 if self.is_replicated else self.process_group.size,
            () if self.secondary is None else self.secondary.places,
        )
        lengths, self._full_indices = self._layout.pieces()
        self._like = [torch.empty(length, device="meta") for length in lengths]
        for index, shape in zip(self._full_indices, self.shapes, strict=True):
            self._like[index] = torch.empty(shape, device="meta")
        self._gaps = sorted(set(range(len(lengths))) - set(self._full_indices))
        return self._layout.pieces(None if self.is_replicated else self.process_group.rank)

    def _adopt(
        self, parameter: torch.nn.Parameter, number: int, memory: torch.Tensor
    ) -> DistributedParameter:
        shape = self.shapes[number]
        ranges = (
            ((0, shape.numel()),) * self.process_group.size
            if self.is_replicated
            else self._layout.ranges(number)
        )
        shard = Shard(
            shape,
            ranges,
            self.process_group,
            replicated=self.is_replicated,
            replicas=self.replicas,
        )
        # The first values of one that was sharded before were noted then.
        whole = None if isinstance(parameter, DistributedParameter) else parameter.detach()
        is_filled = has_values(parameter)
        if is_filled:
            memory.copy_(_part(parameter, shard))
        # From here on the optimizer's parameter is a view of the flat shard: see [Note: aliasing].
        adopted = make_distributed(parameter, shard, memory)
        adopted._in_block = True
        if whole is not None:
            note_first_values(adopted, whole, is_filled=is_filled)
        return adopted


def _part(parameter: torch.nn.Parameter, shard: Shard) -> torch.Tensor:
    if not isinstance(parameter, DistributedParameter):
        return shard.part(parameter.detach())
    # The same ranges on one rank are the same on all: every rank takes the same branch.
    if (
        parameter._shard.ranges == shard.ranges
        and parameter._shard.group.ranks == shard.group.ranks
    ):
        return parameter.detach()
    return shard.part(parameter.gather_like(parameter.detach()))


class RankMajorParameters(FlatParameters):
    """``parameters`` of one dtype that are sharded separately, over the same ranks (at least two).

    An optimizer may hold the parts before the group is made, so each rank keeps the elements it
    had, and only their memory moves. A gathered tensor has one row per rank: its parts, back to
    back. Whole parameters are copied out of the rows, and whole gradients into them, once per step,
    which suits few large tensors, such as embeddings and a head. A row ends with one flag for each
    parameter: whether the rank has a gradient of it.
    """

    def __init__(self, parameters: Sequence[DistributedParameter]) -> None:
        super().__init__(
            parameters,
            process_group=parameters[0].shard_group,
            replicas=parameters[0].shard.replicas,
            replicated=False,
            device=parameters[0].device,
            compute_dtype=parameters[0]._compute_dtype,
        )

    def views_of(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return copies of the whole parameters that were gathered into ``flat``."""
        rows = flat.view(-1, self.shard.numel())
        columns = zip(self.parameters, self._starts, self._longest, strict=True)
        parts = [
            (p, rows[:, start : start + longest].contiguous().view(-1))
            for p, start, longest in columns
        ]
        return [parameter._shard.joined(padded) for parameter, padded in parts]

    whole_of = views_of

    def rows_of(self, grads: Sequence[torch.Tensor | None], dtype: torch.dtype) -> torch.Tensor:
        """Return whole gradients as rows of parts, to be reduced: zero where one is None, with a
        flag for each that is there.
        """
        flat = torch.zeros(self.total, dtype=dtype, device=self.device)
        rows = flat.view(-1, self.shard.numel())
        for number, (parameter, grad) in enumerate(zip(self.parameters, grads, strict=True)):
            if grad is not None:
                start = self._starts[number]
                columns = rows[:, start : start + self._longest[number]]
                parameter._shard.spread(grad.to_dense() if grad.is_sparse else grad, columns)
                # In all rows, because each rank is sent the sum of its own row.
                rows[:, self._flags + number] = 1
        return flat

    def present(self, reduced: torch.Tensor) -> list[bool]:
        """Return, for each parameter, whether any rank had a gradient; ``reduced`` is the sum. The
        host waits for the device.
        """
        # Division and rounding change the sum of flags, but not to zero.
        return [number != 0 for number in reduced[self._flags :][: len(self.parameters)].tolist()]

    def _lay_out(self, parameters: Sequence[torch.nn.Parameter]) -> tuple[list[int], list[int]]:
        numels = [parameter.numel() for parameter in parameters]
        self._longest = [parameter._shard.longest for parameter in parameters]  # type: ignore[attr-defined]
        itemsize = min(self.dtype.itemsize, self.compute_dtype.itemsize)
        row = flat_layout([*self._longest, len(numels)], itemsize, ranks=1)
        *self._starts, self._flags = row.offsets
        # Own parts may be shorter.
        pieces, indices = replace(row, numels=(*numels, len(numels))).pieces()
        return pieces, indices[:-1]

    def _adopt(
        self, parameter: torch.nn.Parameter, number: int, memory: torch.Tensor
    ) -> DistributedParameter:
        assert isinstance(parameter, DistributedParameter)
        # Assigning .data would tell the owner that the program has given it other memory.
        set_data(parameter, memory.copy_(parameter.data))
        return parameter


class SecondaryShard:
    """This rank's secondary shard of parameters that are sharded over ``group``. See
    [Note: two stages].

    ``inside`` and ``across`` are the groups of both stages. ``places[i]`` is the number of the
    slice of rank i of ``group``.
    """

    def __init__(self, group: Group, inside: Group, across: Group) -> None:
        self.inside = inside
        self.across = across
        axis_rank, seen = current().topology.axis_rank, Counter[int]()
        self.places: list[int] = []
        for rank in group.ranks:
            number = axis_rank(REPLICA_AXIS.name, rank)
            self.places.append(seen[number] * across.size + number)
            seen[number] += 1
        self._version = -1  # of the values when they were gathered
        self._is_captured = False
        self._memory: torch.Tensor | None = None

    @classmethod
    def of(cls, group: Group) -> SecondaryShard | None:
        """Return that of parameters sharded over ``group``; None if they need none."""
        stages = current().topology.two_stages(group)
        return None if stages is None else cls(group, *stages)

    def is_outdated(self, version: int) -> bool:
        """Return whether the ``version`` of the values must be gathered, which the caller
        does now.
        """
        is_cuda = current().device.type == "cuda"
        # A graph that is captured runs later, with other values, and may change the parameters
        # without a word.
        self._is_captured |= is_cuda and torch.cuda.is_current_stream_capturing()
        before, self._version = self._version, version
        return self._is_captured or version != before

    def refresh(self, part: torch.Tensor, dtype: torch.dtype) -> Work:
        """Fill it with the ``part`` of each rank of ``across``, in ``dtype``. Collective over
        these.
        """
        if self._memory is None:
            self._memory = part.new_empty(part.numel() * self.across.size, dtype=dtype)
        return gather_in_dtype(self.across, part, self._memory)

    def gather(self, output: torch.Tensor) -> Work:
        """Start to fill ``output`` with those of all ranks of ``inside``. Collective over these."""
        assert self._memory is not None, "the first gather comes after a refresh"
        return self.inside.all_gather(output, self._memory)
