"""``Recording``: the tensors that this rank has recorded, in the order of the model."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator

import torch

from bmt_core.torch_internals import backward_pass, never_compiled
from bmt_params.modules.batch_parts import PROGRESS, Section
from bmtrain._inspect.statistics import joined, moments, row

# The number for tensors recorded outside of parts: it sorts them after all parts of the call.
_OUTSIDE = 1 << 62


class _Piece:
    """The tensor of one call of :func:`record_tensor`. Its statistics are computed at once: the
    code may change it in place.
    """

    def __init__(self, tensor: torch.Tensor, follows_gradient: bool) -> None:
        self.tensor = tensor
        self.moments = moments(tensor)
        self.gradient: torch.Tensor | None = None
        if follows_gradient and tensor.requires_grad:
            _follow_gradient(self)


class RecordedTensor:
    """A tensor by its ``name`` and ``group``; in several pieces if micro-batches have
    recorded it.
    """

    def __init__(self, name: str, group: str | None) -> None:
        self.name = name
        self.group = group
        self.pieces: list[_Piece] = []

    @property
    def tensor(self) -> torch.Tensor:
        """The tensor itself; pieces are put one after the other along dim 0."""
        tensors = [piece.tensor for piece in self.pieces]
        return (
            tensors[0]
            if len(tensors) == 1
            else torch.cat([t[None] if t.dim() == 0 else t for t in tensors])
        )

    def flat_gradient(self) -> torch.Tensor:
        """Return the gradient in one dim, zero where there is none, in float32 for half types."""
        grads = [
            torch.zeros_like(p.tensor) if p.gradient is None else p.gradient for p in self.pieces
        ]
        flat = torch.cat([grad.detach().reshape(-1) for grad in grads])
        return flat.float() if flat.dtype.itemsize < 4 else flat

    def row(self) -> torch.Tensor:
        """Return the row of numbers that describes this rank's part."""
        return joined(torch.stack([row(piece.moments, piece.gradient) for piece in self.pieces]))


class Recording:
    """What this rank records from :meth:`open` to :meth:`close`. Communicates nothing."""

    def __init__(self) -> None:
        self._sections: dict[Section, list[RecordedTensor]] = {}
        self._counts: Counter[tuple[Section, int]] = Counter()
        self._calls_before = 0

    def open(self) -> None:
        self._calls_before = PROGRESS.calls
        _recordings.append(self)
        PROGRESS.watchers.append(self.begin_part)

    def close(self) -> None:
        PROGRESS.watchers.remove(self.begin_part)
        _recordings.remove(self)

    def sections(self) -> dict[Section, list[RecordedTensor]]:
        """Return what was recorded, in the order of the model; also sections that ran and
        recorded nothing.
        """
        return dict(sorted(self._sections.items()))

    def named(self) -> Iterator[tuple[str, RecordedTensor]]:
        """Yield the name and the tensor of all that this rank has recorded."""
        tensors = [tensor for section in self.sections().values() for tensor in section]
        yield from zip(numbered_names((t.name, t.group) for t in tensors), tensors, strict=True)

    def begin_part(self, section: Section) -> list[RecordedTensor]:
        """Note that a part runs on this rank; return what it has recorded so far."""
        relative = section._replace(call=section.call - self._calls_before)
        return self._sections.setdefault(relative, [])

    def add(
        self, tensor: torch.Tensor, name: str, group: str | None, follows_gradient: bool
    ) -> None:
        section, micro_batch = PROGRESS.running or (Section(PROGRESS.calls, _OUTSIDE), 0)
        tensors = self.begin_part(section)
        number = self._counts[section, micro_batch]
        self._counts[section, micro_batch] += 1
        if number == len(tensors):
            tensors.append(RecordedTensor(name, group))
        found = tensors[number]
        if (found.name, found.group) != (name, group):
            raise ValueError(
                f"Micro-batch {micro_batch} records {name!r} of group {group!r} where the one"
                f" before has recorded {found.name!r} of group {found.group!r}. Call"
                " record_tensor() alike for every micro-batch."
            )
        found.pieces.append(_Piece(tensor, follows_gradient))


_recordings: list[Recording] = []
"""Those that are open; shared by all threads, as the parts that run are."""


def record_tensor(
    x: torch.Tensor, name: str, group: str | None = None, requires_grad: bool = True
) -> None:
    """Record ``x`` for the :func:`inspect_tensor` contexts that are open; without any do nothing.

    Call it in a model's forward, on every rank alike. The statistics of the values are computed
    now, without waiting for the device, so what happens to ``x`` in place afterwards does not
    change them. Backward passes through ``x`` add to its gradient, as to ``.grad`` of a tensor
    after ``retain_grad()``, unless ``requires_grad`` is False. The tensor, and its gradient, are
    kept as long as the inspector is.

    If a backward pass runs a forward again, for activation checkpointing, nothing is recorded: the
    first forward was. Only ``torch.utils.checkpoint(use_reentrant=True)`` hides the gradient, for
    its first forward has no graph. Record activations, not parameters, whose memory may be freed
    after the forward: :func:`inspect_model` describes those.
    """
    if _recordings:
        _record(x, name, group, requires_grad)


@never_compiled
def _record(x: torch.Tensor, name: str, group: str | None, follows_gradient: bool) -> None:
    if not isinstance(x, torch.Tensor) or isinstance(x, torch.nn.Parameter):
        raise TypeError(
            f"record_tensor() takes a tensor that the model computes, and {name!r} is a"
            f" {type(x).__name__}. Parameters are described by inspect_model()."
        )
    if backward_pass() != -1:
        return
    for recording in _recordings:
        recording.add(x, name, group, follows_gradient)


def numbered_names(names: Iterator[tuple[str, str | None]]) -> Iterator[str]:
    """Yield ``"{group.}{i}.{name}"`` for each (name, group), where i counts those of the same name
    and group.

    >>> list(numbered_names(iter([("x", None), ("x", "layer"), ("x", None)])))
    ['0.x', 'layer.0.x', '1.x']
    """
    counts: Counter[tuple[str, str | None]] = Counter()
    for key in names:
        name, group = key
        yield f"{'' if group is None else f'{group}.'}{counts[key]}.{name}"
        counts[key] += 1


def _follow_gradient(piece: _Piece) -> None:
    # The graph must not keep the piece, nor the piece itself through the graph.
    reference = weakref.ref(piece)

    def add(gradient: torch.Tensor) -> None:
        found = reference()
        if found is not None:
            gradient = gradient.detach()
            found.gradient = gradient if found.gradient is None else found.gradient + gradient

    handle = piece.tensor.register_hook(add)  # type: ignore[no-untyped-call]
    weakref.finalize(piece, handle.remove)
