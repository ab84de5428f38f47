"""``PostponedGroup``: the gradients of one group that the backward of one call has postponed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import torch

from bmt_core.params.shard import summation_dtype
from bmt_zero.gradients.direct_linear import LayerGradient
from bmt_zero.schedule.sharded_group import ShardedGroup

_Products = list[tuple[int, LayerGradient]]
"""(position of the parameter, its gradient), in the order in which backward reached the layers."""


class PostponedGroup:
    """Implements :class:`bmt_core.modules.postponed_gradients.PostponedPart`.

    ``may_be_freed`` says whether a tensor's memory may be freed when the backward pass is over.
    """

    def __init__(self, group: ShardedGroup, may_be_freed: Callable[[torch.Tensor], bool]) -> None:
        self._group = group
        self._may_be_freed = may_be_freed
        self._products: _Products = []
        self._joined: list[_Products] = []  # products of other passes, taken over
        self._grads: list[torch.Tensor | None] = []
        self._needed: Sequence[bool] = []
        self._reduces = False
        self._awaited: list[object] = []

    def take(self, position: int, product: LayerGradient) -> None:
        """Keep ``product``, the gradient of the parameter at ``position``."""
        product.keep(self._may_be_freed)
        self._products.append((position, product))

    @property
    def reduced_as(self) -> object:
        """See :class:`bmt_core.modules.postponed_gradients.PostponedPart`."""
        return self._group

    @property
    def kept_bytes(self) -> int:
        """See :class:`bmt_core.modules.postponed_gradients.PostponedPart`."""
        if not self._products:
            return 0
        factors = [factor for _, product in self._products for factor in product.factors]
        kept = [*factors, *[grad for grad in self._grads if grad is not None and not grad.is_sparse]]
        return sum({tensor.data_ptr(): tensor.nbytes for tensor in kept}.values())  # weight and bias share a factor

    @property
    def sum_bytes(self) -> int:
        """See :class:`bmt_core.modules.postponed_gradients.PostponedPart`."""
        return self._group.reducer.held_back_bytes

    def take_over(self, other: PostponedGroup) -> None:
        """See :class:`bmt_core.modules.postponed_gradients.PostponedPart`."""
        self._joined += [other._products, *other._joined]
        self._grads = [_sum_of(a, b) for a, b in zip(self._grads, other._grads, strict=True)]
        self._needed = [a or b for a, b in zip(self._needed, other._needed, strict=True)]
        self._reduces = self._reduces or other._reduces
        self._awaited += other._awaited

    def end_backward(self, grads: Sequence[torch.Tensor | None], needed: Sequence[bool], *, reduces: bool) -> None:
        """Keep ``grads``, which autograd has computed. Gradients that are not ``needed`` are ignored.

        With ``reduces`` they will be reduced, together with those held back; otherwise they will be held back.
        """
        may_be_freed = [g is not None and not g.is_sparse and self._may_be_freed(g) for g in grads]
        self._grads = [g.clone() if g is not None and may else g for g, may in zip(grads, may_be_freed, strict=True)]
        self._needed, self._reduces = needed, reduces
        self._awaited = [self._group.reducer.expect(needed)]

    def check(self) -> None:
        """See :class:`bmt_core.modules.postponed_gradients.PostponedPart`."""
        for awaited in self._awaited:
            self._group.reducer.receive(awaited)
        for products in (self._products, *self._joined):
            for _, product in products:
                product.check()

    def compute(self) -> None:
        """See :class:`bmt_core.modules.postponed_gradients.PostponedPart`. Collective."""
        self._complete()  # completes gradients that another call of the block has reduced in the same pass
        self.compute_in_pass()

    def compute_in_pass(self) -> None:
        """Like :meth:`compute`, inside the same backward pass: ``.grad`` is complete when that pass ends. Collective."""
        full = self._group.reducer.room_for_products(reduces=self._reduces, of_several=bool(self._joined))
        for position, product in self._sums():
            if not full.take(position, product):
                made, grad = product.made(), self._grads[position]
                self._grads[position] = made if grad is None else grad + made
        flat = full.complete(self._grads, self._needed)
        self._products, self._joined, self._grads = [], [], []
        if self._reduces:
            self._group.reduce(flat, self._needed)
        else:
            self._group.reducer.hold_back(flat, self._needed)

    def finish(self) -> None:
        """See :class:`bmt_core.modules.postponed_gradients.PostponedPart`."""
        self._complete()
        self._group.reducer.in_flight.wait()

    def drop(self) -> None:
        """See :class:`bmt_core.modules.postponed_gradients.PostponedPart`."""
        for awaited in self._awaited:
            self._group.reducer.forget(awaited)
        self._products, self._joined, self._grads = [], [], []

    def _sums(self) -> Iterator[tuple[int, LayerGradient]]:
        """Yield one product per layer, over the rows of all passes; separate products if the passes called different layers."""
        positions = [position for position, _ in self._products]
        if any([position for position, _ in products] != positions for products in self._joined):
            yield from itertools.chain(self._products, *self._joined)
            return
        for number, (position, product) in enumerate(self._products):
            others = [products[number][1] for products in self._joined]
            yield position, product.joined(others) if others else product

    def _complete(self) -> None:
        self._group.reducer.sum.finish()
        self._group.reducer.end_pass()


def _sum_of(a: torch.Tensor | None, b: torch.Tensor | None) -> torch.Tensor | None:
    if a is None or b is None:
        return b if a is None else a
    return a.to(summation_dtype(a.dtype)) + b
