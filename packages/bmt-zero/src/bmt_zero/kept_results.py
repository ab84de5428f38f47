"""``KeptResults``: results of one call of a block that its recomputation does not compute again.

Forward notes the calls of attention functions and matrix products in order. Of a kept call it keeps
the results and, of the tensors that autograd saves during it, those that are not its arguments,
such as the sums of exponentials of an attention. In the recomputation the call with the same number
is not computed: its results are returned, and the tensors that backward needs are handed out in
forward's order. Arguments among them are found in the recomputed arguments.

[Note: how calls are found] Linear layers of a block call :meth:`KeptResults.call` themselves, and
:class:`AttentionFunctions` puts a function that does so in place of torch's for the rest of the
run. Neither costs a block without kept results anything. Other products, and whatever a user's
function chooses, are found by :class:`CallsOfTorch`, a ``TorchFunctionMode``, which costs the host
time for each operation. So it is used in a block's first call, which shows whether the block has
such products, and afterwards only in blocks that have.

[Note: the last products] A recomputation ends with the last tensor that backward needs, so it does
not compute products after it, such as the last one of a Llama's layer. Their results are not kept.

[Note: overwritten results] The code after a kept call may write to its result in place. Then the
kept tensor has other values, which its version shows, and the call is computed again.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention.bias import CausalBias
from torch.nn.attention.flex_attention import flex_attention
from torch.overrides import TorchFunctionMode

from bmt_core.errors import BmtError
from bmt_core.run.runtime import Runtime
from bmt_core.torch_internals import are_transforms_active, grouped_mm, storage_key

Operation = Callable[..., Any]
KeepFunction = Callable[[Operation, tuple[Any, ...]], bool]
"""A user's function: whether the result of this operation of torch, of these arguments, is kept."""

ATTENTION, PRODUCTS, OTHERS = "attention", "products", "others"
"""The kinds of operations. Only a user's function keeps others."""

_NO_KEYWORDS: dict[str, Any] = {}
_PRODUCTS: dict[Operation, int] = {
    **dict.fromkeys((F.linear, torch.matmul, torch.mm, torch.bmm, torch.mv, grouped_mm), 0),
    **dict.fromkeys((torch.Tensor.matmul, torch.Tensor.__matmul__, torch.Tensor.mm), 0),
    **dict.fromkeys((torch.Tensor.bmm, torch.Tensor.mv), 0),
    **dict.fromkeys((torch.addmm, torch.baddbmm, torch.addbmm, torch.addmv), 1),
    **dict.fromkeys((torch.Tensor.addmm, torch.Tensor.baddbmm, torch.Tensor.addbmm), 1),
}
"""The matrix products, each with the number of the argument whose last dimension is summed over."""


_ATTENTION: set[Operation] = {F.scaled_dot_product_attention}
_CAST: set[Operation] = {
    F.scaled_dot_product_attention,
    *(F.linear, torch.matmul, torch.mm, torch.bmm, torch.addmm, torch.baddbmm, torch.addbmm),
    *(torch.Tensor.matmul, torch.Tensor.__matmul__, torch.Tensor.mm, torch.Tensor.bmm),
    *(torch.Tensor.addmm, torch.Tensor.baddbmm, torch.Tensor.addbmm),
}
"""The operations whose arguments autocast casts, on every device."""


class SavedTensors(Protocol):
    """The interface of a recomputation for kept results, and for layers: see
    [Note: save before computing] in :mod:`bmt_zero.direct_linear`.
    """

    is_running: bool
    """Whether the block is being recomputed; else its forward runs."""
    device_type: str
    kept: KeptResults | None
    captured: list[torch.Tensor] | None
    """A list to which tensors are added that autograd saves in forward."""
    layers: int
    """How many layers have told the recomputation what they save."""

    @property
    def count(self) -> int:
        """How many tensors forward has saved for backward so far."""

    def may_free(self, tensor: torch.Tensor) -> bool:
        """Whether the memory of ``tensor`` is that of gathered parameters."""

    def random_states(self) -> list[torch.Tensor]:
        """Return the present states of the generators."""

    def set_random_states(self, states: Sequence[torch.Tensor]) -> None:
        """Set the states of the generators, in a recomputation."""

    def hand_in(self, tensor: torch.Tensor) -> object:
        """Take the next tensor that backward needs."""

    def before_layer(self, input: torch.Tensor) -> int:
        """Called before a layer saves ``input`` and computes. Returns the argument for
        :meth:`after_layer`.
        """

    def after_layer(self, before: int) -> None:
        """Called after the layer has computed."""

    def clear(self) -> None:
        """Free the recomputed tensors. Called when the backward pass is over."""


class CallBudget(Protocol):
    """The interface of the part of a budget that one call of a block has. Its bytes are given back
    when it is freed.
    """

    numbers: frozenset[int] | None
    """Which calls of operations are kept; None: keep nothing, and measure what each would take."""

    def take(self, size: int) -> bool:
        """Reserve ``size`` bytes; False if that is more than is left."""


class Cost(NamedTuple):
    """What it takes to compute and to keep the result of one call of an operation.
    ``has_matrix``: it is a product with one matrix, as that of a linear layer.
    """

    operations: float
    size: int
    kind: str
    has_matrix: bool


class _Kept:
    """What is kept of one call. ``saved``: for each tensor that autograd saved, the number of the
    tensor among the arguments, or where its view lies in one, or the tensor itself.
    """

    __slots__ = ("kind", "layers", "random", "results", "saved", "size")

    def __init__(
        self,
        kind: type[Any],
        results: list[tuple[torch.Tensor, int, bool]],
        saved: list[int | _View | torch.Tensor],
    ) -> None:
        self.kind, self.results, self.saved = kind, results, saved
        self.layers, self.size = 0, 0
        self.random: list[torch.Tensor] | None = None

    @property
    def is_overwritten(self) -> bool:
        """See [Note: overwritten results]."""
        return True in [result._version != version for result, version, _ in self.results]

    def memory(self) -> int:
        """Return the bytes that are kept."""
        tensors = [result for result, _, _ in self.results]
        if len(tensors) == len(self.saved) == 1 and type(self.saved[0]) is int:
            return tensors[0].untyped_storage().nbytes()
        tensors += [each for each in self.saved if isinstance(each, torch.Tensor)]
        return sum({storage_key(t): t.untyped_storage().nbytes() for t in tensors}.values())


_View = tuple[int, torch.Size, tuple[int, ...], int]
"""The number of a tensor among the arguments, and the size, strides and offset of a view of it."""


class KeptResults:
    """The kept results of one call of a block.

    ``kinds``: those of the operations that are counted. ``chooses``: a user's function that is
    asked for each. ``budget``: it says which calls are kept, and where their bytes come from.
    """

    def __init__(
        self,
        kinds: frozenset[str],
        *,
        uses_mode: bool,
        chooses: KeepFunction | None = None,
        budget: CallBudget | None = None,
    ) -> None:
        self.kinds = kinds
        self.uses_mode = uses_mode
        self.seen: set[str] = set()
        """The kinds of operations that there were."""
        self.needs_mode = False
        """Whether only :class:`CallsOfTorch` saw some of them."""
        self.costs: list[Cost] = []
        """Those of the calls, if the budget wants them measured."""
        self.budget = budget
        self._chooses = chooses
        self.is_inside = False
        """Whether a call of an operation runs that is counted."""
        self.ends_with_product = False
        """Whether the last product is not needed: see [Note: the last products]."""
        self.beside: AbstractContextManager[object] = nullcontext()
        """In force while the block's code runs."""
        self._keeps_nothing = False
        self._last: list[tuple[object, int]] = []
        self._count_at_last = 0
        # Products and attentions have one order, and others one for each operation, because code
        # of bmt that the mode sees may call functions of torch in forward only.
        self._calls: dict[object, list[tuple[Any, _Kept | None]]] = {}
        self._numbers: dict[object, int] = {}

    @contextmanager
    def running(self, saved: SavedTensors) -> Iterator[None]:
        """Inside, the block's code runs, in forward or in the recomputation ``saved``."""
        before, _running.saved = _running.saved, saved
        numbers, self._numbers = self._numbers, {}
        is_inside, self.is_inside = self.is_inside, False
        try:
            with CallsOfTorch(saved, self) if self.uses_mode else nullcontext(), self.beside:
                yield
        finally:
            _running.saved, self._numbers, self.is_inside = before, numbers, is_inside

    def end_forward(self, count: int) -> None:
        """Free results that the recomputation does not use, after a forward that has saved
        ``count`` tensors: see [Note: overwritten results] and [Note: the last products].
        """
        if self._count_at_last == count:
            for order, number in self._last:
                signature, _ = self._calls[order][number]
                self.ends_with_product = self.ends_with_product or order is None
                self._calls[order][number] = signature, None
                if order is None and number < len(self.costs):
                    self.costs[number] = self.costs[number]._replace(size=0)
        for calls in self._calls.values():
            for number, (signature, kept) in enumerate(calls):
                if kept is not None and kept.is_overwritten:
                    calls[number] = signature, None

    def forget(self) -> None:
        """Keep nothing, because the block's forward differentiates what it has computed, which
        needs the graphs of all results.
        """
        for calls in self._calls.values():
            calls[:] = [(signature, None) for signature, _ in calls]
        self._keeps_nothing = True

    def call(
        self,
        saved: SavedTensors,
        kind: str,
        operation: Operation,
        compute: Operation,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] = _NO_KEYWORDS,
        place: object = None,
    ) -> Any:
        """Return ``compute(*args, **kwargs)``, which is ``operation``, or what was kept of it.

        ``place`` tells equal operations at different places in the block apart.
        """
        # Inside of a kept operation nothing is kept by itself, such as an attention's products.
        if (
            self.is_inside
            or kind not in self.kinds
            or not torch.is_grad_enabled()
            or are_transforms_active()
        ):
            return compute(*args, **kwargs)
        if operation in _CAST and torch.is_autocast_enabled(saved.device_type):
            args, kwargs = _as_autocast(args, kwargs, saved.device_type)
        tensors = [value for value in args if isinstance(value, torch.Tensor)]
        if kwargs:
            tensors += [value for value in kwargs.values() if isinstance(value, torch.Tensor)]
        signature = operation, place, [tensor.shape for tensor in tensors]
        order = operation if kind is OTHERS else None
        number = self._numbers.get(order, 0)
        # Counted even if it is not kept, as in the recomputation.
        self._numbers[order] = number + 1
        self.is_inside = True
        try:
            if not saved.is_running:
                kept, result = self._computed(
                    saved, kind, operation, compute, args, kwargs, tensors, number
                )
                self._calls.setdefault(order, []).append((signature, kept))
                return result
            kept = self._kept(order, number, signature)
            if kept is None:
                return compute(*args, **kwargs)
            return _returned(saved, kept, tensors)
        finally:
            self.is_inside = False

    def _computed(
        self,
        saved: SavedTensors,
        kind: str,
        operation: Operation,
        compute: Operation,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: list[torch.Tensor],
        number: int,
    ) -> tuple[_Kept | None, Any]:
        self.seen.add(kind)
        budget, numbers = self.budget, None if self.budget is None else self.budget.numbers
        is_kept = not self._keeps_nothing and (numbers is None or number in numbers)
        if is_kept and self._chooses is not None:
            is_kept = answer(self._chooses, operation, args)
        # A result in memory that the caller passed could not be returned from elsewhere.
        if not is_kept or "out" in kwargs:
            if budget is not None and numbers is None:
                self.costs.append(Cost(0.0, 0, kind, False))
            return None, compute(*args, **kwargs)
        layers, before = saved.layers, saved.captured
        captured: list[torch.Tensor] = []
        saved.captured = captured
        try:
            result = compute(*args, **kwargs)
        finally:
            saved.captured = before
        kept = _kept_of(result, captured, tensors)
        # Only arguments were saved, so backward may never need the result itself.
        if kept is not None and not any(isinstance(each, torch.Tensor) for each in kept.saved):
            if saved.count != self._count_at_last:
                self._count_at_last, self._last = saved.count, []
            self._last.append((operation if kind is OTHERS else None, number))
        # What a user's function chooses may be a view, whose memory is written or freed elsewhere.
        if kept is not None and kind is OTHERS and _is_of_others(kept, saved, tensors):
            kept = None
        if budget is not None:
            size = 0 if kept is None else kept.memory()
            if numbers is None:
                cost = _operations(operation, args, kwargs, result)
                self.costs.append(Cost(cost, size, kind, _has_matrix(operation, tensors)))
                return None, result
            if not budget.take(size):
                return None, result
        if kept is None:
            return None, result
        kept.layers = saved.layers - layers
        # The recomputation goes on with the random numbers after those of this call.
        if kind is OTHERS or (kind is ATTENTION and _dropout(args, kwargs)):
            kept.random = saved.random_states()
        return kept, result

    def _kept(self, order: object, number: int, signature: Any) -> _Kept | None:
        """Return what was kept of the call ``number`` in its ``order``, if it was."""
        # A backward pass inside of forward needs no more calls than there were; and code that makes
        # more calls than in forward is found by the tensors that it saves.
        calls = self._calls.get(order, ())
        if number >= len(calls):
            return None
        before, kept = calls[number]
        if before != signature and (kept is not None or order is None):
            raise BmtError(
                f"Call {number + 1} of a Block with keep=... was {_in_words(before)} in forward,"
                f" and {_in_words(signature)} when the Block was recomputed, so its kept result is"
                " that of another call. Its forward must depend on its arguments, parameters and"
                " torch's random numbers only; or leave out keep=..."
            )
        return None if kept is None or kept.is_overwritten else kept


class _Running:
    saved: SavedTensors | None = None


_running = _Running()
"""The recomputation with kept results whose block's code runs. Not for each thread: while autograd
recomputes in a thread of its own, the others wait for it.
"""


class CallsOfTorch(TorchFunctionMode):
    """Passes the operations of torch that the block's code calls to ``kept``: see [Note: how calls
    are found].
    """

    def __init__(self, saved: SavedTensors, kept: KeptResults) -> None:
        super().__init__()
        self._saved, self._kept = saved, kept

    def __torch_function__(
        self, function: Operation, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():  # a part of the block is compiled, and this with it
            return function(*args, **kwargs)
        kept, kind = self._kept, kind_of(function)
        if kind not in kept.kinds or _name(function) in _PROPERTIES:
            return function(*args, **kwargs)
        if kind is not OTHERS and not kept.is_inside and torch.is_grad_enabled():
            kept.needs_mode = True
        return kept.call(self._saved, kind, function, function, args, kwargs)


def kind_of(operation: Operation) -> str:
    """Return the kind of an operation of torch."""
    if operation in _PRODUCTS or operation is torch.functional.einsum:
        return PRODUCTS
    return ATTENTION if operation in _ATTENTION else OTHERS


_PROPERTIES = "__get__", "__set__"
"""Names of reads and writes of attributes of tensors, which a ``TorchFunctionMode`` sees as
calls.
"""
_FLEX = "transformers.integrations.flex_attention"


class AttentionFunctions:
    """Puts functions that ask for kept results in place of torch's attention functions, in all
    modules that have imported them, until the run ends.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._replaced: list[tuple[dict[str, Any], str, Operation, Operation]] = []
        runtime.at_shutdown.append(self._put_back)
        self._replace(F.scaled_dot_product_attention)
        self._replace(flex_attention)
        if _FLEX in sys.modules:  # which calls a compiled function that it keeps for itself
            self._replace(sys.modules[_FLEX].compile_friendly_flex_attention)

    def _replace(self, function: Operation) -> None:
        asking = _asking(function)
        _ATTENTION.update((function, asking))
        if function in _CAST:
            _CAST.add(asking)
        for path, module in list(sys.modules.items()):
            names = getattr(module, "__dict__", None)
            # The compiler knows torch's functions by their names in its private modules.
            if not isinstance(names, dict) or path == __name__ or path.startswith("torch._"):
                continue
            for name in [name for name, value in list(names.items()) if value is function]:
                names[name] = asking
                self._replaced.append((names, name, function, asking))

    def _put_back(self) -> None:
        for names, name, function, asking in self._replaced:
            _ATTENTION.discard(asking)
            _CAST.discard(asking)
            if names.get(name) is asking:
                names[name] = function


def _asking(function: Operation) -> Operation:
    def of_bias(*args: Any, **kwargs: Any) -> Any:
        # It compares its first argument with what torch's name stands for now.
        bias: Any = CausalBias
        return bias.__torch_function__(attention, (), args, kwargs)

    @functools.wraps(function)
    def attention(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        mask = args[3] if len(args) > 3 else kwargs.get("attn_mask")
        compute = of_bias if isinstance(mask, CausalBias) else function
        saved = _running.saved
        if saved is None or saved.kept is None:
            return compute(*args, **kwargs)
        return saved.kept.call(saved, ATTENTION, attention, compute, args, kwargs)

    return attention


def answer(chooses: KeepFunction, operation: Operation, args: tuple[Any, ...]) -> bool:
    """Return what a user's function says of an operation. Raises ``TypeError`` if that is
    no bool.
    """
    is_kept = chooses(operation, args)
    if type(is_kept) is not bool:
        raise TypeError(
            f"The function given as keep=... returned {is_kept!r} for {_name(operation)}. It must"
            " return True, if the result is kept, or False."
        )
    return is_kept


def _as_autocast(
    args: tuple[Any, ...], kwargs: dict[str, Any], device: str
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments as autocast would pass them to a product or attention function, so that
    what autograd saves of them are arguments.
    """
    dtype = torch.get_autocast_dtype(device)

    def cast(value: Any) -> Any:
        if (
            isinstance(value, torch.Tensor)
            and value.is_floating_point()
            and value.device.type == device
            and value.dtype not in (dtype, torch.float64)
        ):
            return value.to(dtype)
        return value

    return tuple([cast(arg) for arg in args]), {name: cast(arg) for name, arg in kwargs.items()}


def _kept_of(
    result: Any, captured: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]
) -> _Kept | None:
    """Return what is to be kept of a call; None if that is not known, as of subclasses of
    ``torch.Tensor``.
    """
    kind = type(result)
    results = [result] if kind is torch.Tensor else result if kind in (tuple, list) else ()
    if not results or [t for t in (*results, *captured) if type(t) is not torch.Tensor]:
        return None
    if [t for t in tensors if type(t) is not torch.Tensor and type(t) is not nn.Parameter]:
        return None
    return _Kept(
        kind,
        [(t.detach(), t._version, t.requires_grad) for t in results],
        [_source(each, tensors) for each in captured],
    )


def _source(saved: torch.Tensor, tensors: Sequence[torch.Tensor]) -> int | _View | torch.Tensor:
    place, shape, strides = saved.data_ptr(), saved.shape, saved.stride()
    for number, tensor in enumerate(tensors):
        if (
            tensor.data_ptr() == place
            and tensor.shape == shape
            and tensor.stride() == strides
            and tensor.dtype == saved.dtype
        ):
            return number
    memory = storage_key(saved)
    for number, tensor in enumerate(tensors):
        if storage_key(tensor) == memory and tensor.dtype == saved.dtype:
            offset = saved.storage_offset() - tensor.storage_offset()
            return number, shape, strides, int(offset)
    return saved.detach()


def _is_of_others(kept: _Kept, saved: SavedTensors, tensors: Sequence[torch.Tensor]) -> bool:
    """Whether results are views of arguments or of parameters, or saved tensors of parameters."""
    memories = {storage_key(tensor) for tensor in tensors}
    own = [each for each in kept.saved if isinstance(each, torch.Tensor)]
    results = [result for result, _, _ in kept.results]
    return any(storage_key(result) in memories for result in results) or any(
        saved.may_free(tensor) for tensor in (*results, *own)
    )


def _returned(saved: SavedTensors, kept: _Kept, tensors: Sequence[torch.Tensor]) -> Any:
    """Return what was kept, and hand in the tensors that backward needs of the call."""
    # Forward has counted the layers inside of the call, which are not called now.
    saved.layers += kept.layers
    for each in kept.saved:
        if isinstance(each, int):
            saved.hand_in(tensors[each])
        elif isinstance(each, tuple):
            number, size, strides, offset = each
            tensor = tensors[number].detach()
            saved.hand_in(tensor.as_strided(size, strides, int(tensor.storage_offset()) + offset))
        else:
            saved.hand_in(each)
    if kept.random is not None:
        saved.set_random_states(kept.random)
    results = []
    for result, _, requires_grad in kept.results:
        result = result.detach()
        results.append(result.requires_grad_() if requires_grad else result)
    return results[0] if kept.kind is torch.Tensor else kept.kind(results)


def _dropout(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an attention of these arguments may draw random numbers."""
    probability = args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0)
    return not isinstance(probability, float) or probability > 0


def _operations(
    operation: Operation, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
) -> float:
    """Return how many multiplications and additions a product or attention takes, about."""
    if operation in _ATTENTION:
        named = dict(zip(("query", "key", "value"), args, strict=False)) | kwargs
        query, key, value = named["query"], named["key"], named["value"]
        return float(2 * query.numel() * key.shape[-2] * (1 + value.shape[-1] / query.shape[-1]))
    if operation in _PRODUCTS:
        number = _PRODUCTS[operation]
        summed = args[number] if len(args) > number else next(iter(kwargs.values()))
        return float(2 * result.numel() * summed.shape[-1])
    # An einsum: of matrices (m, k) and (k, n) this is 2 m k n.
    product = float(result.numel())
    for tensor in args:
        product *= tensor.numel() if isinstance(tensor, torch.Tensor) else 1
    return float(2 * product**0.5)


def _has_matrix(operation: Operation, tensors: Sequence[torch.Tensor]) -> bool:
    number = _PRODUCTS.get(operation, len(tensors)) + 1
    return len(tensors) > number and tensors[number].ndim == 2


def _in_words(signature: Any) -> str:
    operation, _, shapes = signature
    return f"{_name(operation)} of {', '.join(str(tuple(shape)) for shape in shapes)}"


def _name(operation: Operation) -> str:
    return str(getattr(operation, "__name__", operation))
