"""``keep=...``: which results of a block's forward its recomputation does not compute again."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from typing import Any, Literal

from torch import nn

from bmt_core.errors import ConfigError
from bmt_core.run.runtime import current
from bmt_core.user_warnings import warn_user
from bmt_params.nested import tensors_in
from bmt_zero.compiled_keep import CostsOfProducts, Form, form_of
from bmt_zero.kept_results import (
    ATTENTION,
    OTHERS,
    PRODUCTS,
    AttentionFunctions,
    Cost,
    KeepFunction,
    KeptResults,
)

KeepName = Literal["attention", "products"]
Keep = KeepName | tuple[KeepName, ...] | int | KeepFunction
"""What ``keep=...`` may be."""

_KNOWN = frozenset((ATTENTION, PRODUCTS))
_ALL = frozenset((ATTENTION, PRODUCTS, OTHERS))
_MOST_SHAPES = 64
"""Of how many shapes of arguments a budget remembers the costs of a block's calls."""

Costs = list[Cost]
"""Those of the calls in a block's forward, in order."""


class KeepBytes:
    """A budget of ``total`` bytes for the kept results of all calls of its blocks that wait for
    their backward.

    The first call of each block with arguments of certain shapes is measured and keeps nothing.
    Then the plan is made: of all blocks, the calls with the most operations per byte, as many as
    fit. Each counts as often as calls of its block have waited for backward at a time, as those of
    a pipeline do. What a call keeps is counted, too, so that the total is never exceeded.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self.held = 0
        """How many bytes are kept."""
        self.waiting: Counter[int] = Counter()
        """How many calls of each block wait for their backward."""
        self._most_waiting: Counter[int] = Counter()
        self._costs: dict[int, dict[object, Costs]] = {}
        self._plans: dict[object, dict[int, frozenset[int]]] = {}

    def __reduce__(self) -> Any:
        return KeepBytes, (self.total,)

    def begin_call(self, block: int, shapes: object) -> BytesOfCall:
        """Return the part of a call of ``block`` with arguments of ``shapes``."""
        self.waiting[block] += 1
        if self.waiting[block] > self._most_waiting[block]:
            self._most_waiting[block] = self.waiting[block]
            self._plans.clear()
        numbers = None
        if shapes in self._costs.get(block, ()):
            if shapes not in self._plans:
                self._plans[shapes] = self._plan(shapes)
            numbers = self._plans[shapes][block]
        return BytesOfCall(self, block, shapes, numbers)

    def costs(self, block: int, shapes: object = ()) -> Costs:
        """Return the costs of the calls in ``block`` that were noted."""
        return self._costs[block][shapes]

    def learn(self, block: int, shapes: object, costs: Costs) -> None:
        """Note the costs of the calls in ``block``."""
        known = self._costs.setdefault(block, {})
        if len(known) >= _MOST_SHAPES:
            del known[next(iter(known))]
        known[shapes] = costs
        self._plans.clear()

    def forget(self, block: int) -> None:
        """Forget the costs of ``block``, whose modules have changed."""
        self._costs.pop(block, None)
        self._plans.clear()

    def _plan(self, shapes: object) -> dict[int, frozenset[int]]:
        ranked = sorted(
            (-cost.operations / cost.size, block, number, cost.size * self._most_waiting[block])
            for block, known in self._costs.items()
            # A block that had no call of these shapes counts with what was measured last.
            for number, cost in enumerate(known.get(shapes) or known[next(reversed(known))])
            if cost.size
        )
        left, chosen = self.total, {block: set[int]() for block in self._costs}
        for _, block, number, size in ranked:
            if size <= left:
                left -= size
                chosen[block].add(number)
        return {block: frozenset(numbers) for block, numbers in chosen.items()}


class BytesOfCall:
    """What one call of ``block`` has of a budget, until it is freed. ``numbers``: which calls of
    operations are kept; None: they are measured.
    """

    def __init__(
        self, budget: KeepBytes, block: int, shapes: object, numbers: frozenset[int] | None
    ) -> None:
        self.numbers = numbers
        self._budget, self._block, self._shapes = budget, block, shapes
        self._size = 0

    def __del__(self) -> None:
        self._budget.held -= self._size
        self._budget.waiting[self._block] -= 1

    def learn(self, costs: Costs) -> None:
        """Note what was measured."""
        self._budget.learn(self._block, self._shapes, costs)

    def take(self, size: int) -> bool:
        """Count ``size`` more bytes if they are left."""
        budget = self._budget
        if budget.held + size > budget.total:
            return False
        budget.held += size
        self._size += size
        return True


Choice = frozenset[str] | KeepBytes | KeepFunction
"""What blocks keep: operations of some kinds, what a budget allows, or what a user's function
chooses.
"""


class BlockKeep:
    """What one block keeps, and what its first call has shown of the operations in it."""

    def __init__(self, choice: Choice) -> None:
        self.choice = choice
        current().state(AttentionFunctions)
        # An object that is another one after the block's modules have changed: as it was in the
        # call that was looked at.
        self._classes: object = None
        self._needs_mode = callable(choice)
        self._has_warned = False
        self._measured = 1  # elements of the arguments of a compiled block's first call

    def __reduce__(self) -> Any:
        return BlockKeep, (self.choice,)

    def begin_call(
        self,
        block: int,
        classes: object,
        inputs: Any,
        *,
        is_training: bool,
        is_compiled: bool = False,
    ) -> KeptResults:
        """Return what keeps results of the call of ``block`` with ``inputs`` that begins.

        ``classes``: those of the block's modules, another object after they have changed.
        ``is_training``: the block's mode. ``is_compiled``: other calls of the block are.
        """
        choice, looks = self.choice, classes is not self._classes
        uses_mode = looks or self._needs_mode
        if isinstance(choice, KeepBytes):
            if looks:
                choice.forget(block)
            shapes: tuple[object, ...] = ()
            if is_compiled:
                self._measured = _elements(inputs)
            else:
                shapes = is_training, *[tensor.shape for tensor in tensors_in(inputs)]
            kept = KeptResults(_KNOWN, uses_mode=uses_mode, budget=choice.begin_call(block, shapes))
            if is_compiled:
                kept.beside = CostsOfProducts(kept)
            return kept
        if isinstance(choice, frozenset):
            return KeptResults(choice, uses_mode=uses_mode)
        return KeptResults(_ALL, uses_mode=True, chooses=choice)

    def begin_compiled_call(
        self, block: int, classes: object, inputs: Any
    ) -> tuple[Form, BytesOfCall | None] | None:
        """Return the form of the compiled code of the call that begins, and the bytes that it
        keeps until the call is freed. None: the call is measured, uncompiled, as :meth:`begin_call`
        begins it.

        The plan is made once, of the first call, so that there are few forms. Of calls with other
        shapes the bytes are estimated.
        """
        choice = self.choice
        if not isinstance(choice, KeepBytes):
            return (form_of(choice) if isinstance(choice, frozenset) else choice), None
        if classes is not self._classes:
            return None
        bytes_of_call, costs = choice.begin_call(block, ()), choice.costs(block)
        chosen = bytes_of_call.numbers or frozenset()
        attentions = {n for n, cost in enumerate(costs) if cost.kind == ATTENTION}
        products = [n for n, cost in enumerate(costs) if cost.has_matrix]
        form = form_of(
            [ATTENTION] if attentions and attentions <= chosen else [],
            [index for index, number in enumerate(products) if number in chosen],
        )
        of_form = (attentions if attentions <= chosen else set()) | chosen.intersection(products)
        size = sum(costs[number].size for number in of_form)
        is_kept = bytes_of_call.take(int(size * _elements(inputs) / self._measured))
        return form if is_kept else form_of(()), bytes_of_call

    def end_forward(
        self, kept: KeptResults, count: int, classes: object, module: nn.Module
    ) -> None:
        """Learn what the next calls need from a forward that has saved ``count`` tensors."""
        kept.end_forward(count)
        choice, budget = self.choice, kept.budget
        if isinstance(budget, BytesOfCall) and budget.numbers is None:
            # Not kept: with it the call would not be freed at once.
            beside, kept.beside = kept.beside, nullcontext()
            budget.learn(beside.costs() if isinstance(beside, CostsOfProducts) else kept.costs)
        if classes is self._classes:
            return
        self._classes = classes
        self._needs_mode = kept.needs_mode or callable(choice)
        missing = choice - kept.seen if isinstance(choice, frozenset) else ()
        if missing and not self._has_warned:
            self._has_warned = True
            names = " and ".join(repr(name) for name in sorted(missing))
            warn_user(
                f"{type(module).__name__} keeps no {names}: its first forward called no such"
                " function of torch that is seen. Functions of other libraries and compiled ones"
                " are not; keep=function chooses among the operations that are."
            )


def _elements(inputs: Any) -> int:
    return next((tensor.numel() for tensor in tensors_in(inputs)), 0) or 1


def choice_of(value: Any) -> Choice | None:
    """Return what ``keep=value`` means. Raises :class:`ConfigError` if it is none of the known
    names, bytes or a function.
    """
    if value is None:
        return None
    if type(value) is int and value > 0:
        return KeepBytes(value)
    names = (value,) if isinstance(value, str) else value
    if type(names) is tuple and names and all(name in (ATTENTION, PRODUCTS) for name in names):
        return frozenset(names)
    if callable(value) and not isinstance(value, type):
        choose: KeepFunction = value
        return choose
    raise ConfigError(
        f"keep must be 'attention', 'products', both in a tuple, a number of bytes, or a function"
        f" (operation, args) -> bool, and not {value!r}. None keeps nothing."
    )
