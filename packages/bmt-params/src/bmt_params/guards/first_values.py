"""``FirstValues``: checks, at the first call of a model, that all ranks have cut their parts out of
the same values.

Each rank keeps its part of a whole tensor that every rank was given. If the ranks were given
different ones (weights loaded on rank 0 only, or another seed on every rank), the parts would be
stitched together to a model that nobody has made. So a rank notes a sum of the bits of each whole
tensor when it keeps its part, and again when it is given another one: by ``load_state_dict``, an
initialisation or code that writes whole parameters. At the first call of a module the ranks compare
them. Parts that were written since, by :func:`load` for example, are not compared.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from bmt_core.comm.annotate import annotate
from bmt_core.comm.protocols import Group
from bmt_core.run.runtime import Runtime
from bmt_core.torch_internals import version_of
from bmt_params.guards.equal_values import Entry, check_equal_entries, sum_of_bits

_ADVICE = (
    "Every rank must begin with the same values: make the model after init_distributed(), which"
    " seeds all ranks alike, without a seed of the rank's own, give bmt's layers their values by"
    " init_parameters(model), and load files on every rank. Or let BMTrainModelWrapper(model,"
    " sync='rank0') send those of rank 0 to all. A buffer that is to differ is set after wrapping:"
    " module.name = value."
)


class FirstValues:
    """The sums of bits that are noted and not yet compared, by the group of ranks that must have
    the same values. A run has one: ``current().state(FirstValues)``.
    """

    def __init__(self, runtime: Runtime) -> None:
        self.noted: dict[tuple[int, ...], tuple[Group, list[_Noted]]] = {}
        self._of_tensors: dict[int, _Noted] = {}  # by id

    def note(
        self,
        kept: torch.Tensor,
        whole: torch.Tensor,
        group: Group,
        *,
        is_filled: bool,
        name: str = "",
    ) -> None:
        """Note the values of ``whole``, of which this rank has kept ``kept``; all ranks of
        ``group`` must have the same.

        Every rank notes each tensor, so that lists have the same length; those that have no values
        on some rank, or are sparse, are not compared. ``name`` is for errors; by default that of
        ``kept`` when the values are compared. Communicates nothing.
        """
        if group.size == 1:
            return
        _, noted = self.noted.setdefault(group.ranks, (group, []))
        bits = sum_of_bits(whole) if is_filled and whole.layout is torch.strided else None
        noted.append(
            _Noted(weakref.ref(kept), version_of(kept), whole.shape, whole.dtype, bits, name)
        )
        self._of_tensors[id(kept)] = noted[-1]

    def note_anew(self, kept: torch.Tensor, whole: torch.Tensor, *, version: int | None) -> None:
        """Note ``whole`` in place of what was noted of ``kept``, if that was not compared yet.

        ``kept`` has this rank's part of it when its count of writes is ``version``; None: when
        :meth:`settle` is called. Communicates nothing.
        """
        noted = self._found(kept)
        if noted is not None and whole.shape == noted.shape:
            # Cast, as by the copy to the parameter.
            noted.bits, noted.version = sum_of_bits(whole.to(noted.dtype)), version

    def is_awaited(self, kept: torch.Tensor) -> bool:
        """Whether the values of ``kept`` will be compared at the next call, so that
        :meth:`note_anew` should be called.
        """
        return self._found(kept) is not None

    def settle(self, kept: torch.Tensor) -> None:
        """Say that ``kept`` has its part now of what :meth:`note_anew` has noted."""
        noted = self._found(kept)
        if noted is not None and noted.version is None:
            noted.version = version_of(kept)

    def _found(self, kept: torch.Tensor) -> _Noted | None:
        noted = self._of_tensors.get(id(kept))
        # The id of a tensor that is gone may be another one's now.
        return noted if noted is not None and noted.kept() is kept else None

    def compare(self) -> None:
        """Compare all values that were noted since the last comparison. Collective over each group
        that has any.

        Raises :class:`ConfigError` on all ranks of a group, with the name of the first tensor that
        differs.
        """
        noted, self.noted = self.noted, {}
        self._of_tensors.clear()
        # Sorted: a rank is in several groups, and all must come to the common ones in one order.
        for _, (group, values) in sorted(noted.items(), key=lambda item: item[0]):
            with annotate("to compare the first values of parameters and buffers"):
                check_equal_entries(list(_entries(values)), group, _ADVICE)


@dataclass(slots=True)
class _Noted:
    kept: weakref.ref[torch.Tensor]
    version: int | None
    shape: torch.Size
    dtype: torch.dtype
    bits: torch.Tensor | None
    name: str


def _entries(values: Iterable[_Noted]) -> Iterable[Entry]:
    for value in values:
        kept, name = value.kept(), None
        # The entry of a freed tensor stays: the list must have the same length on every rank.
        if kept is not None:
            name = value.name or getattr(kept, "label", "")
        is_as_noted = kept is not None and version_of(kept) == value.version
        bits = int(value.bits) if is_as_noted and value.bits is not None else None
        yield Entry(name, tuple(value.shape), str(value.dtype), bits)
