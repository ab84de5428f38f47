"""``PartGuard``: operations on a part of a parameter that would give another result than on the
whole parameter raise; ``ndim`` is that of the whole.

Outside of a forward a parameter is this rank's part of it: flat, perhaps empty. Elementwise
operations are right for a part, and an optimizer needs no others. ``w @ w.t()``, ``w.norm()``,
``F.linear(x, w)``, ``w[0]`` or ``w.normal_()`` would compute something else, on each rank something
different, and often without an error. torch calls ``__torch_function__`` of a tensor's class for
each operation, which looks its name up here. Two steps that are each right for a part, such as
``(w * w).sum()``, are not detected.

In an optimizer's step only fills and indices raise. :mod:`bmt_params.guards.elementwise` finds out
whether an optimizer needs whole tensors, and one that computes a norm may not use it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from enum import Enum, auto
from typing import Any, NoReturn, Protocol

import torch
from torch.nn import functional as F
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from bmt_core.errors import ConfigError
from bmt_core.torch_internals import without_torch_functions
from bmt_params.nested import tensors_in


class Part(Protocol):
    """What is asked of a tensor that is, or may be, one rank's part of a parameter."""

    shape: torch.Size

    @property
    def is_part(self) -> bool:
        """Whether other ranks hold other elements, or other layers of the model."""

    @property
    def is_indexable(self) -> bool:
        """Whether the tensor is the whole parameter, in its shape, on every rank."""

    @property
    def whole_shape(self) -> torch.Size:
        """The shape of the whole parameter."""

    @property
    def description(self) -> str:
        """The parameter's name and shape for errors."""


class _Kind(Enum):
    RANDOM_FILL = auto()
    """Every rank would draw the same numbers for its part."""
    RANDOM_LIKE = auto()
    """Draws such numbers for a new tensor. An optimizer may: its state is of the part."""
    POSITION = auto()
    """Selects elements by their place; element 0 of a part is not row 0 of the parameter."""
    SHAPE = auto()
    """Needs the dims of the whole parameter."""
    TOTAL = auto()
    """Over all elements, unless dims are given: right if this rank has all of them."""
    ELEMENTWISE = auto()
    """Right with a tensor of the part's shape, or with one number."""


_NAMES = {
    _Kind.RANDOM_FILL: """bernoulli_ cauchy_ exponential_ geometric_ log_normal_ normal_ random_
        uniform_""",
    _Kind.RANDOM_LIKE: "bernoulli rand_like randint_like randn_like",
    _Kind.POSITION: """__getitem__ __setitem__ unbind select narrow index_select index_add_
        index_copy_ index_fill_ index_put_ index_reduce_ scatter_ scatter_add_ scatter_reduce_ take
        take_along_dim put_ diagonal diag fill_diagonal_ tril tril_ triu triu_ flip roll rot90""",
    _Kind.SHAPE: """matmul __matmul__ __rmatmul__ mm mv bmm addmm addmm_ addmv addmv_ addbmm baddbmm
        addr dot vdot inner outer ger kron cross tensordot einsum chain_matmul matrix_exp
        matrix_power t t_ transpose transpose_ permute movedim moveaxis swapaxes swapdims adjoint
        softmax log_softmax special_softmax special_log_softmax cosine_similarity pairwise_distance
        cdist pdist renorm renorm_ norm_except_dim nuclear_norm cumsum cumprod cummax cummin
        logcumsumexp logsumexp sort argsort msort topk kthvalue trace det logdet slogdet inverse
        pinverse svd qr cholesky cov corrcoef bilinear embedding embedding_bag batch_norm group_norm
        instance_norm layer_norm rms_norm lstm gru rnn_tanh rnn_relu lstm_cell gru_cell
        rnn_tanh_cell rnn_relu_cell prelu""",
    _Kind.TOTAL: """sum nansum mean nanmean prod median nanmedian max min amax amin aminmax argmax
        argmin std std_mean var var_mean norm native_norm frobenius_norm
        _foreach_norm linalg_vector_norm dist all any count_nonzero quantile nanquantile histc""",
    _Kind.ELEMENTWISE: """add add_ __radd__ __iadd__ sub sub_ __rsub__ __isub__ rsub mul mul_
        __rmul__ __imul__ div div_ __rdiv__ __idiv__ true_divide true_divide_ pow pow_ __rpow__
        __ipow__ lerp lerp_ addcmul addcmul_ addcdiv addcdiv_ copy_""",
}
_KINDS = {name: kind for kind, names in _NAMES.items() for name in names.split()}
_NEED_SHAPES = ("linalg_", "conv", "fft_")
_OF_LAYERS = (F.__name__, F.linear.__module__)
_TRANSPOSED = frozenset([torch.Tensor.T, torch.Tensor.mT, torch.Tensor.H, torch.Tensor.mH])

INITIALISE_INSTEAD = (
    "Initialise the model before it is wrapped, or let init_parameters(model) draw whole tensors:"
    " by the init_method of a DistributedParameter or, for a model made on the meta device, by"
    " init=..., which is called with each module."
)


class _Steps:
    """Whether an optimizer's step is under way. After a step that has failed it is said to be so
    until the next one ends.
    """

    are_under_way = False

    def begin(self, *_: object) -> None:
        self.are_under_way = True

    def end(self, *_: object) -> None:
        self.are_under_way = False


_steps = _Steps()


def watch_steps() -> list[Callable[[], None]]:
    """Begin to note when an optimizer steps; return the functions that end this."""
    # A step of an earlier run may have failed.
    _steps.end()
    return [
        register_optimizer_step_pre_hook(_steps.begin).remove,
        register_optimizer_step_post_hook(_steps.end).remove,
    ]


class PartGuard:
    """Base of the classes of parts: see the module. Results of operations are ordinary tensors."""

    __slots__ = ()

    @property
    def whole_shape(self) -> torch.Size:
        """The shape of the whole parameter."""
        raise NotImplementedError

    def _number_of_dims(self) -> int:
        """Return that of the whole parameter, by which libraries choose learning rates and weight
        decay. ``dim()``, which torch's compiler reads, and ``shape`` are the part's.
        """
        return len(self.whole_shape)

    ndim: int = property(_number_of_dims)  # type: ignore[assignment]  # a variable to torch's stubs

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call ``func``, unless that would be wrong for a part among the arguments."""
        kwargs = kwargs or {}
        kind: _Kind | None = None
        # Reads of attributes come as __get__; among these only transposes depend on dims.
        if func.__name__ != "__get__":
            kind = _kind_of(func)
        elif getattr(func, "__self__", None) in _TRANSPOSED:
            kind = _Kind.SHAPE
        if kind is not None:
            _check(kind, func, args, kwargs)
        # Operations on parts would come here again.
        with without_torch_functions():
            return func(*args, **kwargs)


@functools.cache
def _kind_of(func: Callable[..., Any]) -> _Kind | None:
    name = func.__name__
    kind = _KINDS.get(name)
    if kind is None and (
        name.startswith(_NEED_SHAPES) or getattr(func, "__module__", None) in _OF_LAYERS
    ):
        return _Kind.SHAPE
    return kind


def _check(
    kind: _Kind, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    with without_torch_functions():
        tensors = tensors_in((args, kwargs))
        parts: list[Any] = [tensor for tensor in tensors if isinstance(tensor, PartGuard)]
        wrong = [part for part in parts if _is_wrong(kind, part, tensors, func, args, kwargs)]
    if wrong:
        # Of a property such as p.T, func is the __get__ of its descriptor.
        named: Any = func.__self__ if func.__name__ == "__get__" else func  # type: ignore[attr-defined]
        _refuse(kind, named.__name__, wrong[0])


def _is_wrong(
    kind: _Kind,
    part: Part,
    tensors: Sequence[torch.Tensor],
    func: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> bool:
    # Even of the right shape: stages would fill different layers with the same numbers.
    if kind in (_Kind.RANDOM_FILL, _Kind.RANDOM_LIKE):
        return part.is_part and (kind is _Kind.RANDOM_FILL or not _steps.are_under_way)
    if part.is_indexable:
        return False
    if kind is _Kind.POSITION:
        return args[0] is part and not _selects_each_element_by_itself(*args[1:2])
    if _steps.are_under_way:
        return False
    if kind is _Kind.ELEMENTWISE:
        return any(t.shape != part.shape and t.numel() != 1 for t in tensors)
    if kind is _Kind.TOTAL:
        has_all = part.shape.numel() == part.whole_shape.numel()
        return not has_all or _has_dims(func.__name__, args, kwargs)
    return True


def _has_dims(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    # After the tensor, and in norms after the order of the norm; the maximum of two tensors has
    # none.
    dims = args[2 if "norm" in name or "dist" in name or "quantile" in name else 1 :]
    is_given = any(not isinstance(dim, torch.Tensor) and dim is not None for dim in dims)
    return is_given or any(kwargs.get(key) is not None for key in ("dim", "axis"))


def _selects_each_element_by_itself(index: Any = 0) -> bool:
    """Whether ``index`` is ``:``, ``...``, None or a mask, which are right for a part, too."""
    if isinstance(index, torch.Tensor):
        return index.dtype == torch.bool
    return index is None or index is Ellipsis or (isinstance(index, slice) and index == slice(None))


def _refuse(kind: _Kind, name: str, part: Part) -> NoReturn:
    if kind in (_Kind.RANDOM_FILL, _Kind.RANDOM_LIKE):
        raise ConfigError(
            f"{name}() would draw for a part of a sharded parameter, and every rank would draw the"
            f" same numbers for its part. {INITIALISE_INSTEAD} Noise of the whole parameter is"
            " drawn inside whole_parameters(module). If each rank should draw for itself, use"
            " p.detach()."
        )
    if kind is _Kind.POSITION:
        raise ConfigError(
            f"An index into {part.description} would select elements of this rank's part of it,"
            " which is flat, and not rows or elements of the whole parameter. Read and write"
            " whole parameters inside whole_parameters(module), or, where a DistributedModule"
            " fills its own, through the attribute: self.weight.data[0].zero_(). The part"
            " is p.detach()."
        )
    raise ConfigError(
        f"{name}() would compute with this rank's part of {part.description}, which is flat, and"
        " not with the whole parameter. A Block's parameters are whole while the Block itself is"
        " called, not in another method or in one of its submodules called alone. Write p.gather(),"
        " which gives a whole copy that is part of the graph, or enter whole_parameters(module);"
        " both are collective. The part itself is p.detach()."
    )
