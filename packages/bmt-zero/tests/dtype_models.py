"""A model that is computed in another dtype than that of its parameters, and its training in plain
torch: float32 parameters are cast as part of the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils._pytree import tree_map

HALF = torch.bfloat16


class Router(nn.Module):
    """Keeps its dtype, and casts what it is given itself."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x.to(self.weight.dtype), self.weight).softmax(-1).to(x.dtype)


class Layer(nn.Module):
    """A tied pair, a buffer, a frozen parameter, a router, an argument in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.up, self.gate, self.down = nn.Linear(6, 9), nn.Linear(6, 9), nn.Linear(9, 6)
        self.gate.weight = self.up.weight
        self.down.bias.requires_grad_(False)
        self.router = Router()
        self.register_buffer("places", torch.arange(30.0).sin().view(5, 6))
        self.seen: set[tuple[str, torch.dtype]] = set()

    def forward(self, x: torch.Tensor, *, shift: torch.Tensor) -> torch.Tensor:
        named = [*self.named_parameters(), *self.named_buffers(), ("x", x), ("shift", shift)]
        self.seen |= {(name, tensor.dtype) for name, tensor in named}
        h = self.norm(x + self.places.to(x.dtype))
        h = self.down(torch.tanh(self.up(h)) * torch.sigmoid(self.gate(h)))
        return x + h * self.router(x) + shift


class Model(nn.Module):
    """Three layers, and an embedding outside of them that is tied to the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.layers = nn.ModuleList([Layer() for _ in range(3)])
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.embedding(tokens)
        shift = torch.full((6,), 0.1, dtype=torch.float64)
        for layer in self.layers:
            h = layer(h, shift=shift)
        logits = self.head(h).float()
        return F.cross_entropy(logits.flatten(0, 1), tokens.roll(1, 1).flatten())


class Tied(Model):
    """Parameters are shared by layers, and by a layer and the model."""

    def __init__(self) -> None:
        super().__init__()
        first, second, third = self.layers
        third.up.weight = third.gate.weight = first.up.weight
        self.extra = nn.Linear(6, 6)
        self.extra.weight = second.router.weight = first.router.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        extra: torch.Tensor = self.extra(self.embedding(tokens)).float()
        return super().forward(tokens) + extra.square().mean()


def built(*, keeps_routers: bool = True) -> Model:
    torch.manual_seed(0)
    model = Model()
    for layer in model.layers:
        if keeps_routers:
            layer.router.param_dtype = torch.float32  # type: ignore[assignment, union-attr]
    return model


def batch(seed: int) -> torch.Tensor:
    return torch.randint(11, (4, 5), generator=torch.Generator().manual_seed(seed))


def cast_arguments(layers: Iterable[nn.Module]) -> None:
    """Let ``layers`` cast floating arguments, as Blocks do."""

    def cast(value: Any) -> Any:
        is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.to(HALF) if is_float else value

    for layer in layers:
        layer.register_forward_pre_hook(
            lambda _, args, kwargs: tree_map(cast, (args, kwargs)), with_kwargs=True
        )


def train_plainly(
    model: nn.Module,
    kept: Collection[nn.Parameter],
    loss_of: Callable[[Callable[..., Any], int, int], torch.Tensor],
    parts: int,
    steps: int = 3,
) -> dict[str, Any]:
    """Train ``model`` in plain torch, with parameters cast but for ``kept``, on the parts of each
    batch one after the other. ``loss_of(call, step, part)`` returns the loss of a part.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, eps=1e-3)
    found: dict[str, Any] = {}
    for step in range(steps):
        optimizer.zero_grad()
        for part in range(parts):
            read = {n: p if p in kept else p.to(HALF) for n, p in model.named_parameters()}
            loss = loss_of(
                lambda *args, read=read, **kwargs: functional_call(model, read, args, kwargs),
                step,
                part,
            )
            (loss / parts).backward()  # type: ignore[no-untyped-call]
            found[f"loss {step} of {part}"] = loss.detach()
        found |= {f"gradient {step} {n}": p.grad for n, p in model.named_parameters()}
        optimizer.step()
    return found | {n: p.detach() for n, p in model.named_parameters()}


def train_sharded(
    model: nn.Module,
    loss_of: Callable[[Callable[..., Any], int, int], torch.Tensor],
    part: int,
    steps: int = 3,
) -> dict[str, Any]:
    """Train the wrapped ``model``, on one part of each batch. In the form of
    :func:`train_plainly`.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, eps=1e-3)
    parameters: Mapping[str, Any] = dict(model.named_parameters())
    found: dict[str, Any] = {}
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, step, part)
        loss.backward()  # type: ignore[no-untyped-call]
        found[f"loss {step} of {part}"] = loss.detach()
        found |= {
            f"gradient {step} {n}": None if p.grad is None else p.gather_like(p.grad).clone()
            for n, p in parameters.items()
        }
        optimizer.step()
    return found | {n: p.gather_all().detach() for n, p in parameters.items()}


def assert_equal(found: Mapping[str, Any], expected: Mapping[str, Any], part: int) -> None:
    """Compare what a rank has found, bit for bit but for the order of sums over ranks."""
    wanted = {
        name: value
        for name, value in expected.items()
        if not name.startswith("loss") or name.endswith(f" of {part}")
    }
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-7)
