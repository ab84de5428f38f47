"""Kept results of compiled Blocks, where torch's own selective checkpointing keeps them."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    create_selective_checkpoint_contexts,
)

from bmt_zero.kept_results import (
    ATTENTION,
    PRODUCTS,
    Cost,
    KeepFunction,
    KeptResults,
    answer,
)

Form = str | KeepFunction
"""What compiled code keeps, one piece of code for each: words, which are kinds of operations or the
numbers of products with a matrix, or a user's function that is given operations of
``torch.ops.aten``. A text, because numbers would become variables of the compiled code.
"""

_OF_MATRICES = frozenset(("aten::mm", "aten::addmm"))
_PRODUCTS = _OF_MATRICES | {"aten::bmm", "aten::baddbmm", "aten::mv", "aten::_grouped_mm"}
_ATTENTION = ("aten::_scaled_dot_product", "aten::_flash_attention", "aten::_efficient_attention")


def form_of(kinds: Iterable[str], products: Iterable[int] = ()) -> str:
    """Return the form that keeps operations of ``kinds``, and of products with a matrix those with
    these numbers.
    """
    return " ".join([*sorted(kinds), *map(str, sorted(products))])


class CostsOfProducts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the products with a matrix in a call that ``kept`` measures, in the order in which
    compiled code numbers them: also those inside of functions of torch, and without gradients.
    """

    def __init__(self, kept: KeptResults) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept = kept
        self._costs: list[Cost] = []

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = operation(*args, **(kwargs or {}))
        if _name(operation) in _OF_MATRICES:
            has_gradient = self._kept.is_inside or torch.is_grad_enabled()
            operations = 2.0 * result.numel() * args[-1].shape[0]
            self._costs.append(Cost(operations, result.nbytes * has_gradient, PRODUCTS, True))
        return result

    def costs(self) -> list[Cost]:
        """Return the costs of the call that has ended, with those of attention."""
        if self._costs and self._kept.ends_with_product:
            self._costs[-1] = self._costs[-1]._replace(size=0)
        return [cost for cost in self._kept.costs if cost.kind == ATTENTION] + self._costs


@functools.cache
def contexts_of(form: Form) -> Callable[[], Any]:
    """Return the ``context_fn`` for ``torch.utils.checkpoint`` that keeps what ``form`` says."""

    def contexts() -> Any:
        return create_selective_checkpoint_contexts(_Policy(form))  # type: ignore[no-untyped-call]

    return contexts


class _Policy:
    """Says of each operation in one forward, and in its recomputation, whether its result is
    kept.
    """

    def __init__(self, form: Form) -> None:
        self._words = frozenset(form.split()) if isinstance(form, str) else frozenset()
        self._function = None if isinstance(form, str) else form
        self._number: Counter[bool] = Counter()

    def __call__(
        self, context: SelectiveCheckpointContext, operation: Any, *args: Any, **kwargs: Any
    ) -> CheckpointPolicy:
        is_kept = self._keeps(context.is_recompute, operation, args)
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    def _keeps(self, is_recompute: bool, operation: Any, args: tuple[Any, ...]) -> bool:
        if self._function is not None:
            return answer(self._function, operation, args)
        name = _name(operation)
        if name.startswith(_ATTENTION) or name == "flex_attention":
            return ATTENTION in self._words
        if name in _PRODUCTS and PRODUCTS in self._words:
            return True
        if name not in _OF_MATRICES:
            return False
        # Counted apart, because the recomputation calls the same products again.
        number = self._number[is_recompute]
        self._number[is_recompute] += 1
        return str(number) in self._words


def _name(operation: Any) -> str:
    return str(operation.name()).partition(".")[0]
