"""``GatheredCopy``: the read-only copy of a whole parameter that code gets by reading the parameter outside of a forward.

``model.head.weight`` gathers a temporary copy. A write to it, such as ``torch.nn.init.zeros_(model.head.weight)`` in plain torch,
would be lost, so it raises.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch

from bmt_core.errors import ConfigError
from bmt_core.nested import map_tensors, tensors_in
from bmt_core.torch_internals import storage_key, without_torch_functions

_SETTERS = ("__set__", "requires_grad_")


class GatheredCopy(torch.Tensor):
    """A copy of a whole parameter, or a view of one. Results computed from it are ordinary tensors; a write to it raises."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call ``func``. Raises :class:`ConfigError` if it has written to a copy; returns views of a copy as copies."""
        kwargs = kwargs or {}
        copies = [tensor for tensor in tensors_in((args, kwargs)) if isinstance(tensor, GatheredCopy)]
        name = getattr(func, "__name__", str(func))
        if name in _SETTERS and args and isinstance(args[0], GatheredCopy):
            _refuse("Setting an attribute" if name == "__set__" else f"{name}()")
        with without_torch_functions():
            versions = [copy._version for copy in copies]
            result = func(*args, **kwargs)
            if versions != [copy._version for copy in copies]:
                _refuse(f"{name}()")
            keys = {storage_key(copy) for copy in copies}
            return map_tensors(lambda tensor: _as_copy(tensor, keys), result)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        copied: torch.Tensor = memo.setdefault(id(self), self.detach().clone())
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _ordinary(self.detach()).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


def as_gathered_copy(whole: torch.Tensor) -> torch.Tensor:
    """Return ``whole`` as a :class:`GatheredCopy`; as it is where torch does not count writes, in inference mode."""
    return whole if whole.is_inference() or whole.is_meta else whole.as_subclass(GatheredCopy)


def refuse_written(shape: torch.Size) -> NoReturn:
    """Raise :class:`ConfigError` about a forward that has written to the gathered copy of a parameter of ``shape``."""
    raise ConfigError(
        f"A forward wrote to the gathered copy of a sharded parameter of shape {tuple(shape)}; the write would be lost. Change"
        " parameters after the optimizer's step, through model.parameters(), where each rank has its part."
    )


def _as_copy(tensor: torch.Tensor, keys: set[int]) -> torch.Tensor:
    is_view = type(tensor) is torch.Tensor and tensor.layout is torch.strided and storage_key(tensor) in keys
    return tensor.as_subclass(GatheredCopy) if is_view else tensor


def _ordinary(tensor: torch.Tensor) -> torch.Tensor:
    with without_torch_functions():
        return tensor.as_subclass(torch.Tensor)


def _refuse(what: str) -> NoReturn:
    raise ConfigError(
        f"{what} would write to a gathered copy of a sharded parameter, and the write would be lost. The parameters themselves, of"
        " which each rank has a part, are in model.named_parameters(): set requires_grad there. To set whole values, use"
        " model.load_state_dict(values, strict=False), bmt's load(), or init_parameters(model). To compute with a changed copy,"
        " clone() it."
    )
