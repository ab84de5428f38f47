"""``inspect_tensor``: statistics, over all ranks, of tensors that a model records while it runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from bmt_core.comm.collective_section import collective_section
from bmt_core.comm.objects import all_gather_object
from bmt_core.errors import BmtError
from bmt_core.run.runtime import current, world_group
from bmt_params.modules.batch_parts import Section
from bmtrain._inspect.recording import RecordedTensor, Recording, numbered_names
from bmtrain._inspect.statistics import (
    Statistics,
    described,
    equal_gradients,
    equal_values,
    joined,
    row,
)

Shape = tuple[int, ...]


@dataclass(frozen=True)
class _Part:
    """A rank's report about a tensor: the shapes of its pieces, and one row of numbers that
    describes all of them.
    """

    name: str
    group: str | None
    shapes: tuple[Shape, ...]
    numbers: tuple[float, ...]


class TensorInspector:
    """The tensors recorded inside :func:`inspect_tensor`. It keeps them, and their graphs, as long
    as it lives.
    """

    def __init__(self) -> None:
        self._recording = Recording()

    @property
    def summary(self) -> list[dict[str, Any]]:
        """This rank's statistics alone, with each ``tensor``. Communicates nothing.

        As in BMTrain, ``name`` and ``group`` are those given to :func:`record_tensor`;
        ``summary_name`` is the name in :meth:`get_summary`.
        """
        return [
            {
                "name": recorded.name,
                "group": recorded.group,
                "summary_name": name,
                **_described([_part_of(recorded)]),
                "tensor": recorded.tensor,
            }
            for name, recorded in self._recording.named()
        ]

    def get_summary(self) -> list[Statistics]:
        """Return the statistics of each recorded tensor over the global batch. Collective over
        all ranks.

        One dict per tensor, in the order of the model:
        ``name shape std mean max min grad_std grad_mean``. The name is ``"{group.}{i}.{name}"``,
        where i counts the tensors of one name and group. ``std`` is unbiased, as ``Tensor.std()``;
        ``grad_std`` and ``grad_mean`` describe the sum of the gradients of all backward passes so
        far, scaled if the loss was; they are 0 without any.

        The rows of all ranks that see different data are counted. Ranks that see the same data
        (along ``tp``) are counted once if their tensors are equal; otherwise each has a part, and
        all are counted. If equal tensors have different gradients, these are shares, which are
        summed. A pipeline's layer is recorded by the stage that runs it, for all ranks of the
        pipeline. ``shape`` is that of all counted parts concatenated along dim 0; a dim in which
        they differ is -1.

        If ranks have recorded different tensors, all of them raise :class:`BmtError`.
        """
        world = world_group()
        sections = self._recording.sections()
        with collective_section(world, "get_summary()"):
            own = {
                section: [_part_of(recorded) for recorded in found]
                for section, found in sections.items()
            }
        reports: list[dict[Section, list[_Part]]] = all_gather_object(own, world)
        found: list[dict[int, _Part]] = []
        shares: list[tuple[int, RecordedTensor | None, list[str]]] = []
        for section in sorted(set().union(*reports)):
            by_rank = {
                rank: report[section] for rank, report in enumerate(reports) if section in report
            }
            _check_alike(by_rank)
            for number in range(len(next(iter(by_rank.values())))):
                counted, axes = _counted({rank: parts[number] for rank, parts in by_rank.items()})
                if axes:
                    shares.append(
                        (
                            len(found),
                            sections[section][number] if section in sections else None,
                            axes,
                        )
                    )
                found.append(counted)
        if shares:
            _sum_shares(found, shares)
        names = numbered_names(
            (part.name, part.group) for part in [next(iter(p.values())) for p in found]
        )
        return [
            {"name": name, **_described(list(parts.values()))}
            for name, parts in zip(names, found, strict=True)
        ]

    def get_tensor(
        self, name: str, group: str | None = None, index: int | None = None
    ) -> torch.Tensor | None:
        """Return this rank's part of the tensor that was recorded as ``name`` and ``group``, the
        first or that of ``index``.

        It is the tensor itself, part of the graph; None if this rank has not recorded it.
        Communicates nothing. On a stage of a pipeline, ``index`` counts what this stage has
        recorded: give each layer a group of its own.
        """
        found = [
            recorded
            for _, recorded in self._recording.named()
            if (recorded.name, recorded.group) == (name, group)
        ]
        wanted = index or 0
        return found[wanted].tensor if 0 <= wanted < len(found) else None


@contextmanager
def inspect_tensor() -> Iterator[TensorInspector]:
    """Record the tensors that the code inside passes to :func:`record_tensor`::

        with inspect_tensor() as inspector:
            loss = model(batch)
            loss.backward()
        print_rank(format_summary(inspector.get_summary()))

    Gradients are followed after the context too, as long as the inspector lives. When the code
    inside raises, what was recorded before stays. Contexts may be nested: each records everything
    that happens inside it. Communicates nothing.
    """
    inspector = TensorInspector()
    inspector._recording.open()
    try:
        yield inspector
    finally:
        inspector._recording.close()


def _part_of(recorded: RecordedTensor) -> _Part:
    shapes = tuple(tuple(piece.tensor.shape) for piece in recorded.pieces)
    return _Part(recorded.name, recorded.group, shapes, tuple(recorded.row().tolist()))


def _described(parts: Sequence[_Part]) -> Statistics:
    rows = torch.tensor([part.numbers for part in parts], dtype=torch.float64, device="cpu")
    return {
        "shape": _joined_shape([shape for part in parts for shape in part.shapes]),
        **described(joined(rows)),
    }


def _joined_shape(shapes: Sequence[Shape]) -> Shape:
    """Return the shape of tensors of ``shapes`` one after another along dim 0.

    >>> shapes = [(2, 3), (1, 3)], [(2, 3), (2, 4)], [(), ()], [()]
    >>> tuple(map(_joined_shape, shapes))
    ((3, 3), (4, -1), (2,), ())
    """
    if len(shapes) == 1:
        return shapes[0]
    rest = [
        sizes[0] if len(set(sizes)) == 1 else -1
        for sizes in zip(*[shape[1:] for shape in shapes], strict=False)
    ]
    return sum(shape[0] if shape else 1 for shape in shapes), *rest


def _check_alike(by_rank: Mapping[int, Sequence[_Part]]) -> None:
    names = {rank: [(part.name, part.group) for part in parts] for rank, parts in by_rank.items()}
    first, *others = names
    for rank in others:
        if names[rank] != names[first]:
            shown = [", ".join(numbered_names(iter(names[r]))) or "nothing" for r in (first, rank)]
            raise BmtError(
                f"Ranks have recorded different tensors: rank {first} {shown[0]}; rank {rank}"
                f" {shown[1]}. Call record_tensor() alike on every rank."
            )


def _counted(by_rank: Mapping[int, _Part]) -> tuple[dict[int, _Part], list[str]]:
    """Leave out ranks that see the same data and have recorded an equal tensor.

    Returns also the axes along which such ranks have different gradients, which are shares.
    """
    counted, shares = dict(by_rank), list[str]()
    if len(by_rank) == 1:
        return counted, shares
    topology = current().topology
    for axis in topology.same_data_axes:
        first: dict[tuple[int, ...], int] = {}
        pairs = []
        for rank in counted:
            place = tuple(
                topology.axis_rank(other, rank) for other in topology.sizes if other != axis
            )
            pairs.append((counted[rank], counted[first.setdefault(place, rank)]))
        if not all(equal_values(a.numbers, b.numbers) and a.shapes == b.shapes for a, b in pairs):
            continue
        if not all(equal_gradients(a.numbers, b.numbers) for a, b in pairs):
            shares.append(axis)
        counted = {rank: counted[rank] for rank in first.values()}
    return counted, shares


def _sum_shares(
    found: list[dict[int, _Part]], shares: Sequence[tuple[int, RecordedTensor | None, list[str]]]
) -> None:
    """Sum the gradients of the tensors in ``shares``, and replace their numbers in ``found``.
    Collective.
    """
    run = current()
    own: dict[int, tuple[float, ...]] = {}
    for index, recorded, axes in shares:
        if recorded is not None:
            total = recorded.flat_gradient()
            run.topology.group(axes).all_reduce(total).wait()
            values = joined(torch.stack([row(piece.moments, None) for piece in recorded.pieces]))[
                :5
            ]
            own[index] = tuple(row(values, total).tolist())
    for rank, sums in enumerate(all_gather_object(own, run.world)):
        for index, numbers in sums.items():
            if rank in found[index]:
                found[index][rank] = replace(found[index][rank], numbers=numbers)
