"""``GradientComparison``: finds gradients that are summed over ranks which all have computed the
whole gradient.

Along an axis whose ranks see the same data, a parameter without a declared :class:`Locality` is
sharded, and its gradient is summed. That is right if each rank has computed a part, from rows of
its own. If the ranks have computed the same gradient, each the whole, then the sum is too large by
the size of the axis, and nothing else shows it: the loss is right, and Adam hides the factor. So
the ranks compare their own gradients before the reduction. Declarations are compared, too: ranks
that each have a whole gradient, by declaration, update copies of the parameter, which must stay
equal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import torch

from bmt_core.comm.protocols import Group
from bmt_core.errors import ConfigError
from bmt_core.run.bmtrain_names import how_to_declare_whole
from bmt_core.run.runtime import current
from bmt_core.run.topology import Topology
from bmt_params.guards.same_data import Occasions, agree, differ, fingerprints_of_ranks
from bmt_params.locality import Locality, local_axes_of

# Relative to the norm. Undeclared: only gradients that differ by nothing but the order of sums
# count as the same, because shares of large batches are similar. Declared: what differs by more
# than any rounding is not the same.
_SAME = {1: 1e-3, 2: 1e-3, 4: 1e-5, 8: 1e-10}
_DIFFERENT = {1: 3e-2, 2: 3e-2, 4: 1e-3, 8: 1e-3}
# Two shares of a gradient that has few elements may be equal by chance: of a half type in one of
# some hundred steps, and in any dtype in one of thirty where the gradient is nothing but rounding,
# as that of a number which is added to all features before a norm, which takes it off again. So a
# gradient with fewer elements than the first number counts as the same only after the second
# number of occasions in a row.
_FEW, _OCCASIONS_OF_FEW = 8, 4


class GradientComparison:
    """Compares gradients of the same parameters again and again, as :class:`Occasions` says."""

    def __init__(self) -> None:
        self._occasions = Occasions()
        # At how many occasions in a row a gradient was the same; by axis, first rank of the line
        # and id of the parameter.
        self._times_same: Counter[tuple[str, int, int]] = Counter()

    def check(
        self, parameters: Sequence[torch.Tensor], gradients: Callable[[], Sequence[torch.Tensor]]
    ) -> None:
        """Compare this rank's own whole ``gradients``, before they are reduced, with those of ranks
        that see the same data.

        ``parameters`` lie on the same ranks. Collective over all ranks that have them; on CUDA the
        host waits for the device when a comparison is due. Raises :class:`ConfigError` on all these
        ranks if an undeclared gradient is the same on all ranks along an axis, or if a gradient or
        value differs that was declared whole.
        """
        topology = current().topology
        axes = [axis for axis in topology.same_data_axes if topology.axis_size(axis) > 1]
        if not axes or not self._occasions.has_come():
            return
        localities = [
            {locality.axis: locality for locality in getattr(p, "locality", ())} for p in parameters
        ]
        group = _group_of(parameters[0], topology)
        if group is None or not any(
            _is_compared(by_axis.get(axis)) for axis in axes for by_axis in localities
        ):
            return
        own = list(gradients())
        # A value is compared by its part: ranks along an axis along which a parameter is whole have
        # the same part.
        tensors = [*own, *(parameter.detach() for parameter in parameters)]
        found = fingerprints_of_ranks(
            tensors, group, f"to compare gradients of {_name(parameters[0])} and others"
        )
        of_gradients, of_values = found[:, : len(own)], found[:, len(own) :]
        for axis in axes:
            lines = _lines(topology, axis, group)
            for number, (parameter, by_axis) in enumerate(zip(parameters, localities, strict=True)):
                locality, bytes_ = by_axis.get(axis), _bytes_of_number(parameter.dtype)
                if locality is None:
                    times = _OCCASIONS_OF_FEW if own[number].numel() < _FEW else 1
                    for line in lines:
                        key = axis, line[0], id(parameter)
                        is_same = _are_same(of_gradients[line, number], _SAME[bytes_])
                        self._times_same[key] = self._times_same[key] + 1 if is_same else 0
                        if self._times_same[key] >= times:
                            raise _undeclared(parameter, axis)
                if locality is not None and locality.gradients == "whole":
                    for what, numbers in (("gradient", of_gradients), ("value", of_values)):
                        tolerance = _DIFFERENT[bytes_]
                        if any(differ(numbers[line], tolerance)[number] for line in lines):
                            raise _not_whole(parameter, axis, what)


def _is_compared(locality: Locality | None) -> bool:
    return locality is None or locality.gradients == "whole"


def _group_of(parameter: torch.Tensor, topology: Topology) -> Group | None:
    """Return the group of all ranks that compute gradients of ``parameter``; None if the user chose
    its ranks.
    """
    localities: tuple[Locality, ...] = getattr(parameter, "locality", ())
    ranks: Group | None = getattr(parameter, "shard_group", None)
    if ranks is not None and topology.is_own_choice(ranks, local_axes_of(localities)):
        return None
    own = {locality.axis for locality in localities if locality.is_own}
    return topology.group(axis for axis in topology.sizes if axis not in own)


def _lines(topology: Topology, axis: str, group: Group) -> list[list[int]]:
    """Return the indices in ``group`` of each set of ranks that differ along ``axis`` alone."""
    lines = [
        [group.ranks.index(rank) for rank in ranks if rank in group.ranks]
        for ranks in topology.ranks((axis,))
    ]
    return [line for line in lines if len(line) > 1]


def _are_same(found: torch.Tensor, tolerance: float) -> bool:
    """Whether there is a gradient, and its fingerprints ``found`` (ranks, 3) agree."""
    is_there = bool(torch.isfinite(found).all() and found[:, 0].amin() > 0)
    return is_there and bool(agree(found.unsqueeze(1), tolerance))


def _bytes_of_number(dtype: torch.dtype) -> int:
    return dtype.itemsize // 2 if dtype.is_complex else dtype.itemsize


def _name(parameter: torch.Tensor) -> str:
    name: str | None = getattr(parameter, "description", None)
    return name or f"an ordinary parameter of shape {tuple(parameter.shape)}"


def _undeclared(parameter: torch.Tensor, axis: str) -> ConfigError:
    size = current().topology.axis_size(axis)
    if axis in current().topology.parts_axes:
        return ConfigError(
            f"All {size} ranks along {axis!r} have computed the same gradient of"
            f" {_name(parameter)}. Each of these ranks is to compute other tokens of one batch, and"
            " gradients are summed over them. Divide the batch before the model is called:"
            " bmt.cp.split(input_ids=..., labels=...)."
        )
    return ConfigError(
        f"All {size} ranks along {axis!r} have computed the same gradient of {_name(parameter)}. It"
        f" would be summed over them, and be {size} times too large. If each of these ranks"
        " computes the module whole, say so before the model is wrapped:"
        f" {how_to_declare_whole(axis)}. If a layer should get other rows from each rank, give each"
        " its own rows. If the gradients are parts that only happen to be equal:"
        f" set_locality(module, Locality({axis!r}, gradients='share'))."
    )


def _not_whole(parameter: torch.Tensor, axis: str, what: str) -> ConfigError:
    return ConfigError(
        f"The {what} of {_name(parameter)} differs between ranks along {axis!r}, although the"
        " parameter was declared whole there (gradients='whole'), and every rank updates a copy of"
        " it. These ranks must compute it from the same data, with the same values and random"
        " numbers. If each computes it from rows of its own, declare gradients='share'."
    )
