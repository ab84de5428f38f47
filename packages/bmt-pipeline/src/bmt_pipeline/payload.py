"""``Layout``: the structure of a value that stages send each other, made of nested containers,
tensors and plain values.
"""

from __future__ import annotations

import dataclasses
import enum
import pickle
from collections.abc import Iterator, Sequence
from types import BuiltinFunctionType, EllipsisType, FunctionType
from typing import Any, NamedTuple

import torch

from bmt_core.errors import ConfigError
from bmt_params.nested import map_tensors, tensors_in


class Layout:
    """A nested value with meta tensors in place of its tensors, of the same shapes, dtypes
    and ``requires_grad``.

    Layouts can be compared, and sent to other ranks. ``name`` is that of the value in errors.
    :class:`ConfigError` if the value has an object in it that is no tensor, no container that
    :mod:`bmt_params.nested` looks into, and no plain value: what is in it would be unknown.
    """

    def __init__(self, value: Any, name: str = "") -> None:
        self._value = map_tensors(_empty, value)
        entries = list(_entries(self._value, name))
        self.text = "\n".join(f"{entry.path}: {entry.text}" for entry in entries)
        """A text that is the same for equal layouts, on all ranks: a line for each container,
        tensor and plain value.
        """
        self.has_plain_values = any(entry.is_plain for entry in entries)
        """Whether there is more in it than tensors and None."""

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Layout):
            return NotImplemented
        return self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text)

    def __repr__(self) -> str:
        return shapes_in(self._value)

    def check_can_be_sent(self) -> None:
        """Raise ``TypeError`` if a value cannot be pickled."""
        try:
            pickle.dumps(self._value)
        except Exception as error:  # pickle raises many types
            raise TypeError(
                f"The output of a part that another stage computes on must be picklable: {error}"
            ) from error

    def tensors(self) -> list[torch.Tensor]:
        """Return the meta tensors, in order."""
        return tensors_in(self._value)

    def differentiable(self) -> list[torch.Tensor]:
        """Return those of :meth:`tensors` that need gradients."""
        return [tensor for tensor in self.tensors() if tensor.requires_grad]

    def filled(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Return the value with ``tensors`` in it."""
        remaining = iter(tensors)
        return map_tensors(lambda _: next(remaining), self._value)


def shapes_in(value: Any) -> str:
    """Return the shapes and dtypes of the tensors in ``value``, for an error.

    >>> shapes_in([torch.ones(2, 3), None])
    '(2, 3) float32'
    """
    return ", ".join(_kind(tensor) for tensor in tensors_in(value)) or "no tensor"


def as_tuple(value: Any) -> tuple[Any, ...]:
    """Return ``value`` if it is a tuple, else ``(value,)``."""
    return value if isinstance(value, tuple) else (value,)


class _Entry(NamedTuple):
    """One container, tensor or plain value in a nested value."""

    path: str
    text: str
    is_plain: bool = False


def _entries(value: Any, path: str) -> Iterator[_Entry]:
    if isinstance(value, torch.Tensor):
        yield _Entry(path, _kind(value) + (" with gradient" if value.requires_grad else ""))
        return
    parts = _parts(value, path)
    if parts is None:
        yield _Entry(path, _known_text(value, path), value is not None)
        return
    yield _Entry(path, f"{_name(type(value))} of {len(parts)}")
    for end, part in parts:
        yield from _entries(part, (path + end).removeprefix("."))


def _parts(value: Any, path: str) -> list[tuple[str, Any]] | None:
    """Return what :func:`bmt_params.nested.map_tensors` looks into, with the ends of their paths;
    None for other objects.
    """
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return [(f".{name}", part) for name, part in zip(value._fields, value, strict=True)]
    if isinstance(value, (tuple, list)):
        return [(f"[{index}]", part) for index, part in enumerate(value)]
    if isinstance(value, dict):
        return [
            (
                f"[{key!r}]" if isinstance(key, str) else f"[{_known_text(key, f'key of {path}')}]",
                part,
            )
            for key, part in value.items()
        ]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [
            (f".{field.name}", getattr(value, field.name)) for field in dataclasses.fields(value)
        ]
    return None


def _known_text(value: Any, path: str) -> str:
    text = _plain_text(value)
    if text is None:
        raise ConfigError(
            f"A pipeline cannot know what is in {path or 'a value'}, a {_name(type(value))}, which"
            " layers on several stages get or return. Pass tensors, plain Python values, and"
            " tuples, lists, dicts or dataclasses of them."
        )
    return text


def _plain_text(value: Any) -> str | None:
    """Return a text that is the same for equal plain values, on all ranks; None for
    other objects.
    """
    kind = _name(type(value))
    if value is None or isinstance(value, (bool, EllipsisType, range, *_OF_TORCH)):
        return f"{kind} {value!r}"
    if isinstance(value, enum.Enum):
        return f"{kind} {value.name}"
    for base in (int, float, complex, str, bytes):
        if isinstance(value, base):
            return f"{kind} {base.__repr__(value)}"
    if isinstance(value, (set, frozenset)):
        texts = [_plain_text(member) for member in value]
        return None if None in texts else f"{kind} {sorted(map(str, texts))}"
    if isinstance(value, (type, FunctionType, BuiltinFunctionType)):
        return f"{kind} {_name(value)}"  # a function without a name that others find cannot be sent
    return None


_OF_TORCH = (torch.dtype, torch.device, torch.layout, torch.memory_format)


def _name(kind: Any) -> str:
    return (
        kind.__qualname__
        if kind.__module__ == "builtins"
        else f"{kind.__module__}.{kind.__qualname__}"
    )


def _kind(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def _empty(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(
        tensor.shape, dtype=tensor.dtype, device="meta", requires_grad=tensor.requires_grad
    )
