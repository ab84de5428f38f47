"""A small GPT, in plain torch and of compiled Blocks, and its training."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch._dynamo
from torch import nn
from torch._dynamo.utils import counters
from torch.nn import functional as F
from zero_models import full_gradient, my_part

from bmt_core.run.runtime import current
from bmt_params import DistributedModule
from bmt_zero import Block, BMTrainModelWrapper, TransformerBlockList

TOKENS, WIDTH, HEADS = 48, 16, 2
Optimizer = Callable[[Any], torch.optim.Optimizer]


class Layer(nn.Module):
    """Attention and a feed-forward part, with the norms before them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first_norm, self.second_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.to_heads, self.from_heads = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = (
            self.to_heads(self.first_norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        )
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.from_heads(mixed.transpose(1, 2).flatten(2))
        out: torch.Tensor = x + self.down(F.gelu(self.up(self.second_norm(x))))
        return out


class Gpt(nn.Module):
    def __init__(self, layers: int, width: int, kind: type[Layer]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, width)
        self.layers = nn.ModuleList([kind(width) for _ in range(layers)])
        self.head = nn.Linear(width, TOKENS, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        logits: torch.Tensor = self.head(x)
        return logits


class CompiledGpt(DistributedModule):
    """Wrapped parts, the layers of which are compiled Blocks."""

    def __init__(self, gpt: Gpt, level: int, recomputes: bool, keep: Any = None) -> None:
        super().__init__()
        self.embedding = BMTrainModelWrapper(gpt.embedding)
        blocks = [
            Block(BMTrainModelWrapper(layer), recomputes, level, compile=True)
            for layer in gpt.layers
        ]
        self.layers = TransformerBlockList(blocks, keep=keep)
        self.head = BMTrainModelWrapper(gpt.head)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.layers(self.embedding(tokens)))
        return logits


class Training:
    """A training of ``gpt`` on ``device``; on ranks, each has its part of the batch."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self.model, self.optimizer = model, optimizer(model.parameters())

    def step(self, number: int, length: int = 8) -> torch.Tensor:
        """Take a step and return the loss of this rank's data."""
        generator = torch.Generator().manual_seed(number)
        tokens = torch.randint(TOKENS, (8, length), generator=generator)
        loss = F.cross_entropy(
            self.model(my_part(tokens)).float().flatten(0, 1),
            my_part(tokens.roll(1, 1)).flatten(),
            reduction="sum",
        )
        self.optimizer.zero_grad()
        (loss / tokens.numel()).backward()
        self.optimizer.step()
        return loss.detach().cpu() / tokens.numel()

    def look(self, *, evaluates: bool) -> None:
        """Run the model without gradients."""
        self.model.train(not evaluates)
        with torch.no_grad():
            self.model(my_part(torch.ones(8, 8, dtype=torch.int64)))
        self.model.train()


def gpt(
    layers: int,
    *,
    kind: type[Layer] = Layer,
    dtype: torch.dtype = torch.float32,
    width: int = WIDTH,
) -> Gpt:
    """Return the same plain model, on the run's device, wherever it is called."""
    torch.manual_seed(0)
    return Gpt(layers, width, kind).to(current().device, dtype)


def result(training: Training, steps: int) -> dict[str, torch.Tensor | None]:
    """Take ``steps`` and return losses, the last gradients and parameters, all whole."""
    losses = {f"loss {number}": training.step(number) for number in range(steps)}
    gradients = {
        f"gradient of {name}": full_gradient(p) for name, p in training.model.named_parameters()
    }
    state = {name: value.cpu() for name, value in training.model.state_dict().items()}
    return {**losses, **gradients, **state}


def graphs() -> int:
    """Return how many graphs were compiled in this process since the last :func:`from_new`."""
    return counters["stats"]["unique_graphs"]


@contextmanager
def from_new(backend: str = "inductor", limit: int = 8) -> Iterator[type[Layer]]:
    """Inside, nothing was compiled before; yield a class of layers that is new, too, for Blocks
    remember what they compiled.

    ``limit``: how many graphs a function may have; then it is left as it is.
    """
    compile = torch.compile
    torch._dynamo.reset()
    counters.clear()
    torch.compile = functools.partial(compile, backend=backend)  # type: ignore[assignment]
    try:
        with torch._dynamo.config.patch(recompile_limit=limit):
            yield type("NewLayer", (Layer,), {})
    finally:
        torch.compile = compile
        torch._dynamo.reset()
