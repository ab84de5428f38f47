"""``ParameterGroup``: parameters of one dtype in one flat tensor, and this rank's shard of that tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bmt_core.comm import Group
from bmt_core.params.parameter import DistributedParameter, make_distributed, note_first_values
from bmt_core.params.shard import Shard
from bmt_core.params.uninitialized import has_values
from bmt_core.torch_internals import has_gradient_hooks, unflatten
from bmt_zero.sharding.flat_layout import flat_layout


class ParameterGroup:
    """Parameters of one dtype, back to back in one flat tensor; each rank of ``ranks`` keeps an equal slice of it.

    If ``is_replicated`` (ZeRO level 0, or a group of one rank), every rank keeps the whole flat tensor. The parameters become
    :class:`DistributedParameter` and stay the same objects. Making the group is collective if one of them was sharded
    differently before.
    """

    def __init__(
        self, parameters: Sequence[torch.nn.Parameter], *, ranks: Group, replicated: bool, device: torch.device
    ) -> None:
        self.ranks = ranks
        self.is_replicated = replicated or ranks.size == 1
        self.dtype = parameters[0].dtype
        self.device = device
        self.shapes = [p.full_shape if isinstance(p, DistributedParameter) else p.shape for p in parameters]
        # The lengths of the shard's pieces, and for each parameter the index of its piece.
        self.pieces, self.indices = self._lay_out(parameters)
        self.shard = torch.zeros(sum(self.pieces), dtype=self.dtype, device=device)
        self.total = self.shard.numel() * (1 if self.is_replicated else ranks.size)
        parts = torch.split(self.shard, self.pieces)
        with torch.no_grad():
            self.parameters = [
                self._adopt(parameter, number, parts[index])
                for number, (parameter, index) in enumerate(zip(parameters, self.indices, strict=True))
            ]

    @property
    def full_bytes(self) -> int:
        """Size of all parameters, padding included."""
        return self.total * self.dtype.itemsize

    @property
    def labels(self) -> str:
        """The parameters' common name for errors."""
        first, *others = (parameter.label or "a parameter" for parameter in self.parameters)
        return f"{first} and {len(others)} others" if others else first

    @property
    def versions(self) -> list[int]:
        """Torch's version counter of each parameter's part, which counts in-place modifications."""
        return [parameter._version for parameter in self.parameters]

    @property
    def is_hooked(self) -> bool:
        """Whether the user watches gradients of these parameters, so that each must reach autograd."""
        return has_gradient_hooks(self.parameters)

    def views_of(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return the parameters in ``flat``, a flat tensor of this layout, in their shapes: new views at each call."""
        return self.views_and_gaps_of(flat)[0]

    def views_and_gaps_of(self, flat: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return :meth:`views_of` ``flat``, and the padding between them."""
        pieces = unflatten(flat, self._like)
        return [pieces[index] for index in self._places], [pieces[index] for index in self._gaps]

    def _lay_out(self, parameters: Sequence[torch.nn.Parameter]) -> tuple[list[int], list[int]]:
        numels = [shape.numel() for shape in self.shapes]
        self._layout = flat_layout(numels, self.dtype.itemsize, 1 if self.is_replicated else self.ranks.size)
        lengths, self._places = self._layout.pieces()
        self._like = [torch.empty(length, device="meta") for length in lengths]
        for index, shape in zip(self._places, self.shapes, strict=True):
            self._like[index] = torch.empty(shape, device="meta")
        self._gaps = sorted(set(range(len(lengths))) - set(self._places))
        return self._layout.pieces(None if self.is_replicated else self.ranks.rank)

    def _adopt(self, parameter: torch.nn.Parameter, number: int, place: torch.Tensor) -> DistributedParameter:
        shape = self.shapes[number]
        ranges = ((0, shape.numel()),) * self.ranks.size if self.is_replicated else self._layout.ranges(number)
        shard = Shard(shape, ranges, self.ranks, replicated=self.is_replicated)
        whole = None if isinstance(parameter, DistributedParameter) else parameter.detach()
        is_filled = has_values(parameter)
        if is_filled:
            place.copy_(_part(parameter, shard))
        adopted = make_distributed(parameter, shard, place)
        adopted._in_block = True
        if whole is not None:
            note_first_values(adopted, whole, is_filled=is_filled)
        return adopted


def _part(parameter: torch.nn.Parameter, shard: Shard) -> torch.Tensor:
    if not isinstance(parameter, DistributedParameter):
        return shard.part(parameter.detach())
    # The same ranges on one rank are the same on all: every rank takes the same branch.
    if parameter._shard.ranges == shard.ranges and parameter._shard.group.ranks == shard.group.ranks:
        return parameter.detach()
    return shard.part(parameter.gather_like(parameter.detach()))
