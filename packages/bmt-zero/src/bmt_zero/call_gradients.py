"""``CallGradients``: the whole gradients of one parameter group that the backward of one call of a
Block makes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import torch

from bmt_params.modules.postponed_gradients import postponing
from bmt_params.shard import summation_dtype
from bmt_zero.direct_linear import DeferredGradient
from bmt_zero.flat_parameters import FlatParameters
from bmt_zero.parameter_group import ParameterGroup

_Products = list[tuple[int, DeferredGradient]]
"""(index of the parameter in its group, its gradient), in the order in which backward reached
the layers.
"""


class CallGradients:
    """Gradients that layers write, and those that autograd returns, until they are reduced or
    held back.

    Layers write their gradients into a flat tensor. With ``keeps_products`` there is none: their
    products are kept and computed after backward: at once, or when
    :class:`~bmt_params.modules.postponed_gradients.PostponedGradients` says so, whose
    ``PostponedPart`` this is.
    ``may_be_freed`` says whether a tensor's memory may be freed when the backward pass is over.
    """

    def __init__(
        self,
        group: ParameterGroup,
        may_be_freed: Callable[[torch.Tensor], bool],
        *,
        keeps_products: bool,
    ) -> None:
        self._group = group
        self._ledger = group.ledger
        self._may_be_freed = may_be_freed
        self._flat = None if keeps_products else FlatGradients(group.flat, group.ledger.new_flat())
        self._products: _Products = []
        self._joined: list[_Products] = []  # products of other passes, taken over
        self._grads: list[torch.Tensor | None] = []
        self._needed: Sequence[bool] = []
        self._reduces = False
        self._tickets: list[object] = []

    def accept(self, index: int, product: DeferredGradient) -> bool:
        """Write or keep ``product``, the gradient of parameter ``index``. False: the layer must
        return it to autograd.
        """
        if self._flat is not None:
            return self._flat.write(index, product)
        product.keep(self._may_be_freed)
        self._products.append((index, product))
        return True

    def reserve(self, index: int) -> torch.Tensor | None:
        """Return memory for the gradient of parameter ``index``, in its shape; None if the caller
        must allocate its own.
        """
        return None if self._flat is None else self._flat.reserve(index)

    def end_backward(
        self,
        grads: Sequence[torch.Tensor | None],
        needed: Sequence[bool],
        into_grad: Sequence[bool],
        *,
        reduces: bool,
    ) -> Sequence[torch.Tensor | None]:
        """Reduce the gradients, hold them back, or postpone them. Return those that autograd must
        use itself. Collective.

        ``grads`` are those that autograd has computed. ``needed``: which gradients it asks for;
        ``into_grad``: which of them go to ``.grad``. Without ``reduces`` they are held back.
        """
        if True not in into_grad:  # torch.autograd.grad(): the results go to its caller
            flat = self._flat or FlatGradients(self._group.flat, self._ledger.new_flat())
            full = flat.complete(grads, needed)
            return self._group.end_gradients(full, needed, into_grad=False)
        if self._flat is not None:
            full = self._flat.complete(grads, into_grad)
            return self._group.end_gradients(full, into_grad, into_grad=True, reduces=reduces)
        # They are read after the pass, when the whole parameters may be gone.
        may_be_freed = [g is not None and not g.is_sparse and self._may_be_freed(g) for g in grads]
        self._grads = [
            g.clone() if g is not None and may else g
            for g, may in zip(grads, may_be_freed, strict=True)
        ]
        self._needed, self._reduces = into_grad, reduces
        self._tickets = [self._ledger.postpone(into_grad)]
        if postponing.gradients is not None:
            postponing.gradients.add(self)
        else:
            # As in ParameterGroup.end_gradients().
            self._reduces = reduces or self._ledger.sum.is_adding
            self.check()
            self._compute()
        return [None] * len(needed)

    @property
    def reduced_as(self) -> object:
        """The group, which is the same for all calls."""
        return self._group

    @property
    def kept_bytes(self) -> int:
        """Bytes kept for the products to compute later; 0 if there is no product."""
        if not self._products:
            return 0
        factors = [factor for _, product in self._products for factor in product.factors]
        kept = [
            *factors,
            *[grad for grad in self._grads if grad is not None and not grad.is_sparse],
        ]
        # Weight and bias share a factor.
        return sum({tensor.data_ptr(): tensor.nbytes for tensor in kept}.values())

    @property
    def sum_bytes(self) -> int:
        """Bytes of the sum that is needed if the gradients of several passes are
        computed separately.
        """
        return self._ledger.held_back_bytes

    def join(self, other: CallGradients) -> None:
        """Take over the gradients of ``other``, a call of the same group, to compute them together
        with these.
        """
        self._joined += [other._products, *other._joined]
        self._grads = [_sum_of(a, b) for a, b in zip(self._grads, other._grads, strict=True)]
        self._needed = [a or b for a, b in zip(self._needed, other._needed, strict=True)]
        self._reduces = self._reduces or other._reduces
        self._tickets += other._tickets

    def check(self) -> None:
        """Raise :class:`BmtError` if ``.grad`` was cleared since backward, or a kept tensor
        modified in place.
        """
        for ticket in self._tickets:
            self._ledger.resume(ticket)
        for products in (self._products, *self._joined):
            for _, product in products:
                product.check()

    def compute(self) -> None:
        """Compute the postponed gradients, and start to reduce them or hold them back.
        Collective.
        """
        # Completes gradients that another call of the block has reduced in the same pass.
        self._ledger.end_pass()
        # All ranks postpone the same calls, so they reduce in the same order here, too.
        self._compute()

    def finish(self) -> None:
        """Complete ``.grad``."""
        self._ledger.end_pass()
        self._ledger.in_flight.wait()

    def drop(self) -> None:
        """Free everything: the backward pass has failed."""
        for ticket in self._tickets:
            self._ledger.forget(ticket)
        self._products, self._joined, self._grads = [], [], []

    def _compute(self) -> None:
        wide = self._ledger.sum_for_products(reduces=self._reduces, of_several=bool(self._joined))
        if wide is None:
            flat = FlatGradients(self._group.flat, self._ledger.new_flat())
        else:
            flat = FlatGradients(self._group.flat, wide[0], is_sum=wide[1], takes_wide=True)
        try:
            for index, product in self._sums():
                if not flat.write(index, product):
                    gradient, others = product.computed(), self._grads[index]
                    self._grads[index] = gradient if others is None else others + gradient
            full = flat.complete(self._grads, self._needed)
        except BaseException:
            self._ledger.drop()  # the sum may have some of these gradients already
            raise
        self._products, self._joined, self._grads = [], [], []
        if self._reduces:
            self._group.reduce(full, self._needed)
        else:
            self._ledger.hold_back(full, self._needed)

    def _sums(self) -> Iterator[tuple[int, DeferredGradient]]:
        """Yield one product per layer, over the rows of all passes; separate ones if the passes
        called different layers.
        """
        indices = [index for index, _ in self._products]
        if any([index for index, _ in products] != indices for products in self._joined):
            yield from itertools.chain(self._products, *self._joined)
            return
        for number, (index, product) in enumerate(self._products):
            others = [products[number][1] for products in self._joined]
            yield index, product.joined(others) if others else product


class FlatGradients:
    """The whole gradients of ``parameters`` in ``flat``, a flat tensor laid out like them;
    uninitialised until complete.

    Linear layers write their gradients into it directly (:mod:`bmt_zero.direct_linear`);
    :meth:`complete` copies all others into it at once. ``is_sum``: ``flat`` holds a sum already,
    and all gradients are added to it.
    ``takes_wide``: layers may write gradients directly even if the dtype of ``flat`` is wider than
    that of the parameters.
    """

    def __init__(
        self,
        parameters: FlatParameters,
        flat: torch.Tensor,
        *,
        is_sum: bool = False,
        takes_wide: bool = False,
    ) -> None:
        self._adds = is_sum
        self._takes = takes_wide or flat.dtype == parameters.compute_dtype
        self._flat = flat
        self._views, self._gaps = parameters.views_and_gaps_of(self._flat)
        self._is_written = [self._adds] * len(self._views)
        self._reserved: set[int] = set()

    def write(self, index: int, gradient: DeferredGradient) -> bool:
        """Write or add the gradient of parameter ``index``. Return False if layers cannot write
        this dtype.
        """
        if not self._takes:
            return False
        # The layer was called before, or the tensor holds a sum.
        if self._is_written[index]:
            gradient.add_to(self._views[index])
        else:
            gradient.write_to(self._views[index])
            self._is_written[index] = True
        return True

    def reserve(self, index: int) -> torch.Tensor | None:
        """Return memory for the whole gradient of parameter ``index``, in its shape; None if it was
        written or reserved.
        """
        if not self._takes or self._is_written[index] or index in self._reserved:
            return None
        self._reserved.add(index)
        return self._views[index]

    def complete(
        self, grads: Sequence[torch.Tensor | None], needed: Sequence[bool]
    ) -> torch.Tensor:
        """Add ``grads`` to what layers have written, and return the flat tensor.

        Where a gradient is not ``needed`` it is zero; but a sum keeps its values there.
        """
        copied: list[tuple[torch.Tensor, torch.Tensor]] = []
        added: list[tuple[torch.Tensor, torch.Tensor]] = []
        empty = list(self._gaps)
        for view, grad, need, written in zip(
            self._views, grads, needed, self._is_written, strict=True
        ):
            if not need or (grad is None and not written):
                empty.append(view)
            # A compiled layer returns the memory that it reserved: its gradient is in place.
            elif grad is not None and not (self._reserved and grad.data_ptr() == view.data_ptr()):
                (added if written else copied).append(
                    (view, grad.to_dense() if grad.is_sparse else grad)
                )
        if copied:
            torch._foreach_copy_([view for view, _ in copied], [grad for _, grad in copied])
        if added:
            torch._foreach_add_([view for view, _ in added], [grad for _, grad in added])
        if empty and not self._adds:
            torch._foreach_zero_(empty)
        return self._flat


def _sum_of(a: torch.Tensor | None, b: torch.Tensor | None) -> torch.Tensor | None:
    if a is None or b is None:
        return b if a is None else a
    return a.to(summation_dtype(a.dtype)) + b
