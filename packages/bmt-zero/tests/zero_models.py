"""Models and training loops that the tests of bmt-zero share: the same in plain torch on one
process and sharded on many.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from bmt_core.comm import all_gather_object
from bmt_core.run import runtime
from bmt_params.init.parameter_init import init_parameters
from bmt_params.parameter import DistributedParameter
from bmt_zero import Block, BMTrainModelWrapper, direct_linear

BATCH = 4  # samples in the whole batch: divided over the ranks
# The layers of tests are small, and those of large models are what a test is about.
all_weights = patch.object(direct_linear, "SMALL", 0)


X = torch.ones(1, 2)


def line(weight: float = 1.0) -> nn.Linear:
    """A layer for ``X``: all its weights are ``weight``, and its bias is zero."""
    layer = nn.Linear(2, 2)
    with torch.no_grad():
        layer.weight.fill_(weight)
        layer.bias.zero_()
    return layer


class Layer(nn.Module):
    """Odd sizes, a tied pair, a buffer, a bias that only shifts."""

    def __init__(self, width: int, hidden: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, dtype=dtype)
        self.up = nn.Linear(width, hidden, dtype=dtype)
        self.gate = nn.Linear(width, hidden, bias=False, dtype=dtype)
        self.gate.weight = self.up.weight
        self.down = nn.Linear(hidden, width, dtype=dtype)
        self.register_buffer("scale", torch.full((1,), 0.5, dtype=dtype))

    def forward(self, x: torch.Tensor, *, shift: torch.Tensor | None = None) -> torch.Tensor:
        h = self.norm(x)
        h = torch.tanh(self.up(h)) * torch.sigmoid(self.gate(h))
        out: torch.Tensor = x + self.down(h) * self.scale
        return out if shift is None else out + shift


class Uses(nn.Module):
    """Linear layers on 3-D and 2-D inputs and on a parameter, one used twice, a tied and a frozen
    weight, and other parameters.
    """

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = (
            nn.Linear(6, 9),
            nn.LayerNorm(9),
            nn.Linear(9, 6, bias=False),
        )
        self.gate = nn.Linear(6, 9)
        self.gate.weight = self.up.weight
        self.twice, self.frozen = nn.Linear(6, 6), nn.Linear(6, 6)
        self.frozen.weight.requires_grad_(False)
        self.latents, self.read = nn.Parameter(torch.randn(5, 6)), nn.Linear(6, 6)
        self.places = nn.Embedding(4, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.places(torch.arange(x.shape[1], device=x.device))
        hidden = torch.tanh(self.norm(self.up(x))) * torch.sigmoid(self.gate(x))
        x = x + self.down(hidden.flatten(0, 1)).view_as(x)
        x = self.twice(torch.tanh(self.twice(x)))
        return self.frozen(x) + self.read(self.latents).mean(0)


class Auxiliary(nn.Module):
    """Keeps a loss that its result does not tell of."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = line(3.0)
        self.aux = torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(x)
        self.aux = (self.linear.weight**2).sum() + y.square().sum()
        return y


class Model(nn.Module):
    def __init__(
        self, layers: int = 3, width: int = 7, hidden: int = 13, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, width, dtype=dtype)
        self.layers = nn.ModuleList([Layer(width, hidden, dtype) for _ in range(layers)])
        self.head = nn.Linear(width, 11, bias=False, dtype=dtype)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.embedding(tokens)
        for layer in self.layers:
            h = layer(h, shift=h.detach() * 0.1)
        out: torch.Tensor = self.head(h)
        return out


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 + step)
    data = torch.randint(11, (2, BATCH, 5), generator=generator)
    return data[0], data[1]


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Summed, so that the sum over ranks is the whole batch's."""
    return (
        nn.functional.cross_entropy(
            logits.float().flatten(0, 1), targets.flatten(), reduction="sum"
        )
        / BATCH
    )


def my_part(tensor: torch.Tensor) -> torch.Tensor:
    share = len(tensor) // runtime.world_size()
    return tensor[runtime.rank() * share :][:share].to(runtime.current().device)


def full_gradient(parameter: nn.Parameter) -> torch.Tensor | None:
    if parameter.grad is None:
        return None
    if isinstance(parameter, DistributedParameter):
        return parameter.gather_like(parameter.grad).cpu().clone()
    return parameter.grad.cpu().clone()


def grads_of(module: nn.Module, times: float = 1) -> dict[str, Any]:
    """The whole gradients by name, multiplied: ranks that compute the same sum it up as often as
    there are ranks. Collective.
    """
    grads = {name: full_gradient(parameter) for name, parameter in module.named_parameters()}
    return {name: None if grad is None else times * grad for name, grad in grads.items()}


def of_all_ranks(value: Any) -> list[Any]:
    """What each rank has given, on every rank."""
    return all_gather_object(value, runtime.current().world)


def train(
    model: nn.Module,
    steps: int,
    data: Callable[[torch.Tensor], torch.Tensor],
    *,
    lr: float = 0.05,
    micro_batches: int = 1,
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
) -> dict[str, Any]:
    """Train and return losses (of this rank's data), the gradients of the last step, and the final
    parameters, all whole.
    """
    opt = (
        optimizer(model.parameters())
        if optimizer
        else torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    )
    losses = []
    grads: dict[str, torch.Tensor | None] = {}
    for step in range(steps):
        opt.zero_grad()
        total = torch.zeros(())
        for micro in range(micro_batches):
            tokens, targets = (data(part) for part in batch(step * micro_batches + micro))
            loss = loss_of(model(tokens), targets)
            loss.backward()
            total += loss.detach().cpu()
        losses.append(total)
        grads = {name: full_gradient(p) for name, p in model.named_parameters()}
        opt.step()
    state = {name: value.cpu().clone() for name, value in model.state_dict().items()}
    return {"loss": torch.stack(losses), "grad": grads, "state": state}


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def plain(
    steps: int = 3, *, seed: int = 0, dtype: torch.dtype = torch.float32, **kwargs: Any
) -> dict[str, Any]:
    torch.manual_seed(seed)
    return train(Model(dtype=dtype), steps, lambda part: part, **kwargs)


def sharded(
    levels: Sequence[int],
    use_checkpoint: bool,
    steps: int = 3,
    *,
    dtype: torch.dtype = torch.float32,
    **kwargs: Any,
) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Model(dtype=dtype)
    for layer, level in zip(model.layers, levels, strict=True):
        Block(layer, use_checkpoint=use_checkpoint, zero_level=level)
    BMTrainModelWrapper(model)
    init_parameters(model)
    return train(model, steps, my_part, **kwargs)


class Product(torch.autograd.Function):
    """``x @ weight``, of a weight that is given."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weight = ctx.saved_tensors
        return grads[0] @ weight.t(), x.flatten(0, 1).t() @ grads[0].flatten(0, 1)


class Products(TorchDispatchMode):
    """Counts the products of linear layers with a bias, which backward has none of."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket.__name__ == "addmm"
        return func(*args, **(kwargs or {}))


class Interrupt(Exception):
    """What a backward pass is made to raise."""


def interrupt(grad: torch.Tensor) -> None:
    raise Interrupt


class Root(nn.Module):
    """A Block's layer, and a head outside of Blocks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(3, 3)])
        self.head = nn.Linear(3, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.layers[0](x))
        return out


def wrapped_root() -> Any:
    return BMTrainModelWrapper(Root())
