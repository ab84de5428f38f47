"""A plain model that can be built on the meta device, and a meter of the memory that initialising
it takes.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bmt_params.guards.first_values import FirstValues
from bmt_params.parameter import DistributedParameter


class Scale(nn.Module):
    """A buffer that no checkpoint holds, computed anew where it was lost."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("factor", torch.empty(3), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.factor.copy_(torch.tensor([0.5, 1.0, 2.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor.mean()


class Layer(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.gate = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width)
        self.scale = Scale()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        out: torch.Tensor = x + self.scale(
            self.down(torch.tanh(self.up(h)) * torch.sigmoid(self.gate(h)))
        )
        return out


class Model(nn.Module):
    """Takes and gives what the models of ``zero_models`` do; the head is tied, and so are two
    layers' gates if ``ties``.
    """

    def __init__(
        self, layers: int = 3, width: int = 7, hidden: int = 13, *, ties: bool = True
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, width)
        self.layers = nn.ModuleList([Layer(width, hidden) for _ in range(layers)])
        if ties:
            self.layers[2].gate.weight = self.layers[0].gate.weight  # type: ignore[union-attr]
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.embedding(tokens)
        for layer in self.layers:
            h = layer(h)
        out: torch.Tensor = self.head(self.norm(h))
        return out


class MemoryMeter(TorchDispatchMode):
    """Bytes of the storages that operations made while it was entered: those that live, and the
    most after any operation.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._made: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and not tensor.is_meta:
                storage = tensor.untyped_storage()
                self._made[storage._cdata] = weakref.ref(storage)
        self.peak = max(self.peak, self.current)
        return result

    @property
    def current(self) -> int:
        """Bytes that live now; a storage may have been resized since it was made."""
        return sum(
            storage.nbytes() for found in self._made.values() if (storage := found()) is not None
        )


@contextmanager
def without_sums_of_first_values() -> Iterator[None]:
    """Inside, no sums of whole tensors are noted: they need some 100 kB, which is much beside these
    models only.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FirstValues, "is_awaited", lambda *_: False)
        yield


def whole_bytes(module: nn.Module) -> int:
    """Bytes of the parameters of ``module``, whole."""
    parameters = [p for p in module.parameters() if isinstance(p, DistributedParameter)]
    return sum(p.full_shape.numel() * p.dtype.itemsize for p in parameters)


def kept_bytes(module: nn.Module) -> int:
    """Bytes of the storages that parameters and buffers lie in: a block's flat shards with
    their padding.
    """
    storages = [tensor.untyped_storage() for tensor in (*module.parameters(), *module.buffers())]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())
