"""``GradientSum``: accumulates the reduced gradients of shards in float32, and sets ``.grad`` from
the sum.

[Note: gradient accumulation] ``p.grad`` has the dtype of ``p``, so that every optimizer can use it.
Adding many small gradients in a half type stalls (1 + 256 is 256 in bfloat16). So from the second
gradient on the running sum is kept in float32, and ``p.grad`` is this sum, rounded. A single
gradient needs no such sum. The sum is valid only while ``p.grad`` is unchanged. If the user has set
``p.grad`` to None, zeroed it, or clipped it in place, the sum starts again from ``p.grad``. So both
forms of ``zero_grad`` work, those of a model and of any optimizer. The float32 sum goes with the
gradients: if a :class:`GradientSum` of other parameters, or of fewer, is the next to add to one of
them, it adds to that float32 sum.

[Note: when .grad appears] A reduction runs in a lane while the backward pass goes on. Autograd adds
to ``.grad`` on the computation's stream, and must not touch memory that the lane still writes. So
:meth:`GradientSum.add` sets ``.grad`` to None for the rest of the pass. When the pass ends,
``.grad`` is set to the complete sum, which includes what autograd has added meanwhile (from a
penalty on the shards themselves, for example). After a pass that failed, such a ``.grad``
stays None.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from bmt_core.run.lanes import Mark
from bmt_core.torch_internals import backward_pass, base_of, memory_states
from bmt_params.shard import summation_dtype


class GradientWitness:
    """Remembers the gradients of some parameters, to tell later whether anybody has changed or
    replaced them.

    All ranks must come to the same answer, because it decides what they reduce. So storages and
    versions are compared, not addresses: a rank's part may be empty, and empty tensors have
    no address.
    """

    def __init__(
        self, parameters: Sequence[torch.nn.Parameter], left: Sequence[torch.Tensor | None]
    ) -> None:
        self._parameters = [p for p, grad in zip(parameters, left, strict=True) if grad is not None]
        grads = [grad for grad in left if grad is not None]
        # The storages are kept, so that no new gradient can get the same ones. The tensors are not:
        # autograd copies a gradient to which there are other references, and takes it
        # over otherwise.
        self._storages = [grad.untyped_storage() for grad in grads]
        self._left = memory_states(grads)

    def unchanged(self) -> bool:
        """Whether every gradient still has the same memory, unmodified."""
        return self._left == self._present()

    def changed_all(self) -> bool:
        """Whether no gradient is as it was."""
        return all(left != found for left, found in zip(self._left, self._present(), strict=True))

    def changed(self, parameter: torch.nn.Parameter) -> bool:
        """Whether the gradient of ``parameter`` is another one, or was written to. False if it
        had none.
        """
        pairs = zip(self._parameters, self._left, strict=True)
        return any(p is parameter and memory_states([p.grad]) != [left] for p, left in pairs)

    def _present(self) -> list[tuple[int, int, int] | None]:
        return memory_states([parameter.grad for parameter in self._parameters])


class GradientSum:
    """The sum of the reduced gradients of ``parameters``, whose parts are in one flat tensor.

    ``pieces`` are the lengths of the consecutive pieces of the flat tensor, and ``indices[i]``
    tells which of them is parameter i. See [Note: gradient accumulation] and
    [Note: when .grad appears].
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        pieces: Sequence[int],
        indices: Sequence[int],
    ) -> None:
        self._parameters = parameters
        self._pieces = list(pieces)
        self._indices = indices
        self._flat: torch.Tensor | None = None  # the .grad are views of this
        self._total: torch.Tensor | None = None  # the float32 sum; _flat is this sum rounded
        self._given: list[bool] = []  # which .grad are views of _flat
        self.witness: GradientWitness | None = None  # of each .grad that it has seen last
        self._added: list[bool] | None = None  # which gradients the pass under way has added
        self._marks: list[Mark] = []  # after which the lane has added what was added, in order

    @property
    def is_first(self) -> bool:
        """Whether the next gradient is the first one of the sum."""
        # A list, because a generator would make a call for each parameter.
        return self._added is None and not any([p.grad is not None for p in self._parameters])  # noqa: C419

    def forget_if_cleared(self) -> None:
        """Free the sum if the gradients were cleared, or if the pass that took them failed."""
        if self._added is not None and backward_pass() == -1:
            self._wait()  # the lane may still write to what is freed
            self._added = self._flat = self._total = self.witness = None
        if self._flat is not None and self.is_first:
            self._flat = self._total = self.witness = None

    def add(
        self, reduced: torch.Tensor, needed: Sequence[bool], factor: float = 1.0
    ) -> Callable[[], None] | None:
        """Take the gradients out of ``.grad``, and return a function that adds ``reduced * factor``
        to the sum; the lane calls it.

        ``reduced`` is flat, of the parameters' dtype or float32, and zero where ``needed`` is
        False. If it is the first gradient and has the parameters' dtype, it becomes the sum itself,
        and None is returned unless it must be multiplied. Call :meth:`ready_at` with the mark after
        which the lane has run the function.
        """
        dtype = self._parameters[0].dtype
        if self.is_first:
            self._added, self._total = list(needed), None
            if reduced.dtype == dtype:
                self._flat = reduced  # the usual step of one pass: nothing is copied or added
                return None if factor == 1 else lambda: _multiply(reduced, factor)
            self._flat = flat = torch.empty_like(reduced, dtype=dtype)
            return lambda: _copy(flat, reduced, factor)
        if self._added is None:
            self._begin_with_present(needed)
        else:
            self._added = [a or b for a, b in zip(self._added, needed, strict=True)]
        assert self._flat is not None
        flat, total, starts = self._flat, self._total, False
        # From the second gradient on: a step of one pass needs no float32 memory.
        if total is None and dtype.itemsize < 4:
            self._total = total = torch.empty_like(flat, dtype=torch.float32)
            starts = True
        return lambda: _add(flat, total, reduced, factor, starts=starts)

    def add_now(self, reduced: torch.Tensor, needed: Sequence[bool]) -> None:
        """Like :meth:`add`, for a complete ``reduced``, which is added at once on the
        computation's stream.
        """
        add = self.add(reduced, needed)
        if add is not None:
            self._wait()  # the lane may still write what was added before in this pass
            add()

    def ready_at(self, mark: Mark) -> None:
        """Note the mark after which the function that :meth:`add` returned has run."""
        self._marks.append(mark)

    @property
    def is_adding(self) -> bool:
        """Whether :meth:`add` was called in the current pass, so that ``.grad`` is set when
        it ends.
        """
        return self._added is not None

    @property
    def flat(self) -> torch.Tensor | None:
        """The flat tensor of which the ``.grad`` are views, or will be when the pass ends."""
        return self._flat

    def finish(self) -> None:
        """Wait for the lane and put the sum into ``.grad``. Does nothing if nothing was added."""
        if self._added is not None:
            for parameter, view in zip(self._parameters, self.hand_over(), strict=True):
                if view is not None:
                    parameter.grad = view

    def hand_over(self) -> list[torch.Tensor | None]:
        """Return the gradients that were added, complete. The computation waits for the lane."""
        added, flat = self._added, self._flat
        assert added is not None and flat is not None
        self._wait()
        self._added, self._given = None, added
        views = self._chosen(flat, added)
        # From other graphs of this pass, such as a penalty on the parameter itself.
        self._add_what_came_meanwhile(flat, added)
        if self._total is not None:
            keep_float32_sum(flat, self._total)
        self.witness = GradientWitness(self._parameters, views)
        return views

    def watch(self, left: Sequence[torch.Tensor | None]) -> None:
        """Let :attr:`witness` remember ``left``, each parameter's ``.grad`` as it is now, or None
        to leave it out.
        """
        # A pass has failed: the lane still writes, and forget_if_cleared() will follow.
        if self._added is not None:
            return
        if self.witness is not None and not self.witness.unchanged():
            self._flat = self._total = None  # the gradients are no longer this sum
        self.witness = GradientWitness(self._parameters, left)

    def seen_by_hooks(
        self, reduced: torch.Tensor, needed: Sequence[bool]
    ) -> list[torch.Tensor | None]:
        """Return the gradients for autograd, which passes them through the user's hooks to
        ``.grad``. Used instead of :meth:`add`.

        ``reduced`` is complete. For a half type the result is the whole sum, including the old
        ``.grad``, which is None meanwhile.
        """
        if reduced.dtype == self._parameters[0].dtype and reduced.dtype.itemsize >= 4:
            return self._chosen(reduced, needed)
        self.add_now(reduced, needed)
        return self.hand_over()

    def rounded(self, reduced: torch.Tensor, needed: Sequence[bool]) -> list[torch.Tensor | None]:
        """Return ``reduced`` as gradients of the parameters' dtype, without touching ``.grad``
        (``torch.autograd.grad``).
        """
        return self._chosen(reduced.to(self._parameters[0].dtype), needed)

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return each parameter's part of ``flat``."""
        pieces = torch.split(flat, self._pieces)
        return [pieces[index] for index in self._indices]

    def _wait(self) -> None:
        marks, self._marks = self._marks, []
        for mark in marks:
            mark.wait()

    def _chosen(self, flat: torch.Tensor, needed: Sequence[bool]) -> list[torch.Tensor | None]:
        return [view if yes else None for view, yes in zip(self.views(flat), needed, strict=True)]

    def _begin_with_present(self, needed: Sequence[bool]) -> None:
        if not self._is_ours(needed):
            device = self._parameters[0].device
            self._flat = torch.zeros(
                sum(self._pieces), dtype=self._parameters[0].dtype, device=device
            )
            # A gradient that this pass does not add to stays in .grad.
            grads = [
                p.grad if need else None for p, need in zip(self._parameters, needed, strict=True)
            ]
            wide = [None if grad is None else float32_sum_of(grad) for grad in grads]
            has_wide = any(total is not None for total in wide)
            self._total = torch.zeros_like(self._flat, dtype=torch.float32) if has_wide else None
            views = self.views(self._flat if self._total is None else self._total)
            pairs = [
                (view, grad if total is None else total)
                for view, grad, total in zip(views, grads, wide, strict=True)
                if grad is not None
            ]
            if pairs:  # empty if only parameters that were frozen meanwhile have gradients
                torch._foreach_copy_([view for view, _ in pairs], [grad for _, grad in pairs])
        self._added = list(needed)
        for parameter, need in zip(self._parameters, needed, strict=True):
            if need:
                # Until the lane has added: nobody must read half a sum.
                parameter.grad = None

    def _is_ours(self, needed: Sequence[bool]) -> bool:
        """Whether the gradients that are needed, and no others, are views of the flat tensor as we
        left it.
        """
        if self._flat is None or self.witness is None or not self.witness.unchanged():
            return False
        others = [
            (given and not need) or (need and not given and p.grad is not None)
            for given, need, p in zip(self._given, needed, self._parameters, strict=True)
        ]
        return not any(others)

    def _add_what_came_meanwhile(self, flat: torch.Tensor, added: Sequence[bool]) -> None:
        came = [
            (i, p.grad) for i, p in enumerate(self._parameters) if added[i] and p.grad is not None
        ]
        if not came:
            return
        sums = flat if self._total is None else self._total
        views = self.views(sums)
        torch._foreach_add_([views[i] for i, _ in came], [grad for _, grad in came])
        if sums is not flat:
            flat.copy_(sums)


class LeafGradients:
    """The sum of the gradients that ``leaf``, a gathered parameter, gets from micro-batches; for
    half types in float32.
    """

    def __init__(self, leaf: torch.Tensor) -> None:
        self._total: torch.Tensor | None = None
        # torch annotates nothing.
        leaf.register_post_accumulate_grad_hook(self._add)  # type: ignore[no-untyped-call]

    @property
    def has_gradient(self) -> bool:
        """Whether the leaf has got a gradient."""
        return self._total is not None

    def rounded(self, like: torch.Tensor) -> torch.Tensor:
        """Return the sum in the dtype of ``like``; zeros if there was no gradient."""
        return torch.zeros_like(like) if self._total is None else self._total.to(like.dtype)

    def _add(self, leaf: torch.Tensor) -> None:
        # Taken out, because autograd would add the next one in the dtype of the leaf.
        grad, leaf.grad = leaf.grad, None
        if self._total is None or grad is None:
            self._total = grad
        else:
            self._total = self._total.to(summation_dtype(grad.dtype))
            self._total += grad


def keep_float32_sum(flat: torch.Tensor, total: torch.Tensor) -> None:
    """Remember ``total`` as the float32 sum of which ``flat`` is the rounding, as long as the
    memory of ``flat`` lives.
    """
    # On the memory's owner, so that whoever has a .grad, a view of it, finds the sum.
    base = base_of(flat)
    base = flat if base is None else base
    base._bmt_float32_sum = base._version, flat.storage_offset(), total  # type: ignore[attr-defined]


def float32_sum_of(grad: torch.Tensor) -> torch.Tensor | None:
    """Return the float32 sum of which ``grad`` is the rounding; None if there is none, or if
    somebody has written to ``grad``.
    """
    version, offset, total = getattr(base_of(grad), "_bmt_float32_sum", (None, 0, None))
    if total is None or version != grad._version or not grad.is_contiguous():
        return None
    start = int(grad.storage_offset()) - offset
    part: torch.Tensor = total[start : start + grad.numel()].view(grad.shape)
    return part


# _copy and _add multiply in a pass over the memory that they make anyway; only _multiply needs a
# pass of its own.
def _multiply(reduced: torch.Tensor, factor: float) -> None:
    reduced *= factor


def _copy(flat: torch.Tensor, reduced: torch.Tensor, factor: float) -> None:
    if factor == 1:
        flat.copy_(reduced)
    else:
        torch.mul(reduced, factor, out=flat)


def _add(
    flat: torch.Tensor,
    total: torch.Tensor | None,
    reduced: torch.Tensor,
    factor: float,
    *,
    starts: bool,
) -> None:
    if total is None:
        flat.add_(reduced, alpha=factor)
        return
    if starts:
        total.copy_(flat)
    total.add_(reduced, alpha=factor)
    flat.copy_(total)
