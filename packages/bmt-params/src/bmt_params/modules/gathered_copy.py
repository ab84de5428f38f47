"""``GatheredCopy``: the copy of a whole parameter that code gets by reading the parameter outside
of a forward.

``model.head.weight`` gathers a temporary copy. A constructor may write to it as in plain torch:
``self.weight.data[0].zero_()``, or ``torch.nn.init.zeros_(model.head.weight)``. Until the parameter
is trained, such a write takes effect: every rank makes it, and keeps its part of the result. Later
it raises: an optimizer may have changed the parameter since the copy was gathered. Every rank must
write the same, which is compared at the model's first call. Arrays of numpy that share a copy's
memory are read-only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch

from bmt_core.errors import ConfigError
from bmt_core.torch_internals import storage_key, without_torch_functions
from bmt_params.nested import map_tensors, tensors_in
from bmt_params.parameter import DistributedParameter, note_whole_values

_SETTERS = ("__set__", "requires_grad_")
_TO_NUMPY = ("numpy", "__array__")


class _Source:
    """The parameter that ``whole`` was gathered from. Copies, which are views of ``whole``, refer
    to it, and it to none of them.
    """

    def __init__(self, parameter: DistributedParameter, whole: torch.Tensor) -> None:
        self._parameter = parameter
        self._whole = whole
        # Another node later on shows that autograd has recorded a write.
        self._graph = whole.grad_fn
        self._version = parameter._version

    def is_of(self, parameter: object, whole: torch.Tensor) -> bool:
        """Whether this is ``parameter``, and ``whole`` all of the copy."""
        # Not only the same memory: a view of some rows is not the parameter.
        return parameter is self._parameter and whole.is_set_to(self._whole)

    def write_back(self, what: str) -> None:
        """Copy this rank's part of the copy, to which ``what`` has written, to the parameter; raise
        if that would be wrong.
        """
        parameter = self._parameter
        if self._whole.grad_fn is not self._graph:
            raise ConfigError(
                f"{what} would write to {parameter.description} while autograd records it. Write"
                " inside torch.no_grad(), or to its .data, as in plain torch."
            )
        if parameter.whole_shape != parameter.full_shape:
            raise ConfigError(
                f"{what} would write to this rank's slice of {parameter.description}, of which each"
                " rank has another one. Let an init_method of the DistributedParameter write, which"
                " init_parameters(model) calls with the whole tensor, or write inside"
                " whole_parameters(module)."
            )
        if not parameter.is_untrained:
            _refuse(what)
        if parameter._version != self._version:
            raise ConfigError(
                f"{what} would write to a gathered copy of {parameter.description} that is out of"
                " date: the parameter has changed since it was read. Read it again from its module"
                " before you write."
            )
        with torch.no_grad():
            parameter.detach().copy_(parameter.local_part(self._whole.detach()))
            note_whole_values(parameter, self._whole.detach(), version=parameter._version)
        self._version = parameter._version


class GatheredCopy(torch.Tensor):
    """A copy of a whole parameter, or a view of one. Results computed from it are
    ordinary tensors.
    """

    _source: _Source
    _is_param = True  # torch's mark: isinstance(model.head.weight, nn.Parameter)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call ``func``; return views of a copy as copies. If it has written to a copy, so does the
        parameter, or this raises.
        """
        kwargs = kwargs or {}
        copies = [
            tensor for tensor in tensors_in((args, kwargs)) if isinstance(tensor, GatheredCopy)
        ]
        name = getattr(func, "__name__", str(func))
        if name in _SETTERS and args and isinstance(args[0], GatheredCopy):
            # Only what .data is set to can be copied to the parameter.
            if getattr(func, "__self__", None) is not torch.Tensor.data:
                _refuse("Setting an attribute" if name == "__set__" else f"{name}()")
            return _set_data(args[0], args[1])
        with without_torch_functions():
            versions = [copy._version for copy in copies]
            result = func(*args, **kwargs)
            for copy, version in zip(copies, versions, strict=True):
                if copy._version != version:
                    copy._source.write_back(f"{name}()")
            # torch counts no writes through an array, so they would not reach the parameter.
            if name in _TO_NUMPY and not result.flags.owndata:
                result.setflags(write=False)
            sources = {storage_key(copy): copy._source for copy in copies}
            return map_tensors(lambda tensor: _as_copy(tensor, sources), result)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        copied: torch.Tensor = memo.setdefault(id(self), self.detach().clone())
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _ordinary(self.detach()).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


def as_gathered_copy(whole: torch.Tensor, parameter: DistributedParameter) -> torch.Tensor:
    """Return ``whole``, gathered from ``parameter``, as a copy; as it is on the meta device."""
    return whole if whole.is_meta else _copy_of(whole, _Source(parameter, whole))


def is_copy_of(value: object, parameter: object) -> bool:
    """Whether ``value`` is a whole copy of ``parameter``: what ``self.bias += 1`` assigns after it
    has written to the copy.
    """
    if not isinstance(value, GatheredCopy):
        return False
    with without_torch_functions():
        return value._source.is_of(parameter, value)


def refuse_written(shape: torch.Size) -> NoReturn:
    """Raise :class:`ConfigError` about a forward that has written to the gathered copy of a
    parameter of ``shape``.
    """
    raise ConfigError(
        f"A forward wrote to the gathered copy of a sharded parameter of shape {tuple(shape)}; the"
        " write would be lost. Change parameters after the optimizer's step, through"
        " model.parameters(), where each rank has its part."
    )


def _as_copy(tensor: torch.Tensor, sources: Mapping[int, _Source]) -> torch.Tensor:
    is_view = (
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and storage_key(tensor) in sources
    )
    return _copy_of(tensor, sources[storage_key(tensor)]) if is_view else tensor


def _copy_of(tensor: torch.Tensor, source: _Source) -> GatheredCopy:
    copy = tensor.as_subclass(GatheredCopy)
    copy._source = source
    return copy


def _set_data(copy: GatheredCopy, value: torch.Tensor) -> None:
    """Write ``value`` to ``copy``. After ``weight.data *= 2``, which assigns what it has written
    to, that is done.
    """
    with without_torch_functions():
        is_written = value.is_set_to(copy)
        is_alike = (value.shape, value.dtype) == (copy.shape, copy.dtype) and not isinstance(
            value, GatheredCopy
        )
    if not is_written and not is_alike:
        _refuse("Setting .data to another copy, or to a tensor of another shape or dtype,")
    if not is_written:
        copy.detach().copy_(value)


def _ordinary(tensor: torch.Tensor) -> torch.Tensor:
    with without_torch_functions():
        return tensor.as_subclass(torch.Tensor)


def _refuse(what: str) -> NoReturn:
    raise ConfigError(
        f"{what} would write to a gathered copy of a sharded parameter, and the write would be"
        " lost. The parameters themselves, of which each rank has a part, are in"
        " model.named_parameters(): set requires_grad there. Values may be written before the model"
        " is trained. Later set whole values inside whole_parameters(module), or by"
        " model.load_state_dict(values, strict=False) or bmt's load(). To compute with a changed"
        " copy, clone() it."
    )
