"""Models drawn at random out of the ways in which modules use their parameters, for comparing ranks
with one process.
"""

from __future__ import annotations

import enum
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from zero_models import Product

WIDTH = 6
TOKENS = 11
LENGTH = 5


class Mlp(nn.Module):
    def __init__(self, r: random.Random) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, hidden := r.choice([1, 7, 13]), bias=r.random() < 0.5)
        self.down = nn.Linear(hidden, WIDTH, bias=r.random() < 0.5)
        self.in_place = r.random() < 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        middle = self.up(x)
        if self.in_place:
            middle.mul_(0.5).add_(0.1)
        return self.down(torch.tanh(middle))

    def widen(self, factor: int) -> None:
        """Make the hidden width ``factor`` times as large."""
        up, down = self.up, self.down
        self.up = nn.Linear(WIDTH, factor * up.out_features, bias=up.bias is not None)
        self.down = nn.Linear(factor * up.out_features, WIDTH, bias=down.bias is not None)


class Attention(nn.Module):
    def __init__(self, r: random.Random) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.heads = r.choice([1, 2, 3])
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, -1, WIDTH // self.heads)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(attended.transpose(1, 2).flatten(2))


class TorchAttention(nn.Module):
    """Torch's own, which reads parameters of its children without calling them."""

    def __init__(self, r: random.Random) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(WIDTH, 2, batch_first=True, bias=r.random() < 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x, x, x, need_weights=False)[0]


class Norm(nn.LayerNorm):
    def __init__(self, r: random.Random) -> None:
        super().__init__(WIDTH, bias=r.random() < 0.5)


class Statistics(nn.BatchNorm1d):
    """A norm that keeps statistics of each rank's own data."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.flatten(0, 1)).view_as(x)


class Scale(nn.Module):
    """Parameters without a layer, of which one has no dimension and the other an attribute."""

    def __init__(self, r: random.Random) -> None:
        super().__init__()
        self.vector = nn.Parameter(torch.empty(WIDTH))
        self.number = nn.Parameter(torch.empty(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.vector * getattr(self.vector, "factor", 1.0) + self.number


class Pieces(nn.Module):
    """One parameter used in pieces, transposed, and in a concatenation."""

    def __init__(self, r: random.Random) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2 * WIDTH + 1, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second, last = self.weight.split([WIDTH, WIDTH, 1])
        both = torch.cat([second, first, self.weight[:1]])
        return (x @ first.t() + F.linear(x, both)[..., :WIDTH]) * last


class Adapted(nn.Module):
    """A layer with an adapter of low rank, which was added late."""

    def __init__(self, layer: nn.Linear, generator: torch.Generator) -> None:
        super().__init__()
        self.layer = layer
        self.first = random_parameter((2, layer.in_features), layer.weight, generator)
        self.second = random_parameter((layer.out_features, 2), layer.weight, generator)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + F.linear(F.linear(x, self.first), self.second)


def random_parameter(
    shape: tuple[int, ...], like: torch.Tensor, generator: torch.Generator
) -> nn.Parameter:
    """Return a parameter of the dtype and device of ``like``."""
    return nn.Parameter(0.3 * torch.randn(shape, generator=generator).to(like))


class Twice(nn.Module):
    """One layer called twice, and its weight once more by another one."""

    def __init__(self, r: random.Random) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.tied = nn.Linear(WIDTH, WIDTH, bias=False)
        if r.random() < 0.5:
            self.tied.weight = self.layer.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.tied(torch.sin(self.layer(torch.tanh(self.layer(x)))))


class Experts(nn.Module):
    """Which expert works is in the data, so that ranks differ; one may work on none."""

    def __init__(self, r: random.Random) -> None:
        super().__init__()
        self.experts = nn.ModuleList([Mlp(r) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.flatten(0, 1)
        choice = rows.detach().sum(-1).mul(3).long().remainder(3)
        out = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            mine = (choice == number).nonzero().squeeze(-1)
            if len(mine):
                out = out.index_add(0, mine, expert(rows[mine]))
        return out.view_as(x)


class Positions(nn.Embedding):
    def __init__(self, r: random.Random) -> None:
        super().__init__(LENGTH + 2, WIDTH, padding_idx=r.choice([None, 1]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + super().forward(torch.arange(x.shape[1], device=x.device))


class Own(nn.Module):
    """A function with a derivative of its own, which saves its parameter."""

    def __init__(self, r: random.Random) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Product.apply(x, self.weight)


class Aside(nn.Module):
    """What the input's gradient does not go through, beside what no gradient reaches, and what is
    not used.
    """

    def __init__(self, r: random.Random) -> None:
        super().__init__()
        self.aside, self.silent, self.unused = Mlp(r), Mlp(r), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            quiet = self.silent(x)
        return x + self.aside(x.detach()) + quiet


class Counting(nn.Module):
    """Buffers that forward writes, one of which goes into the result."""

    seen: torch.Tensor
    mean: torch.Tensor

    def __init__(self, r: random.Random) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        self.mean = 0.5 * self.mean + 0.25
        return self.layer(x) * self.mean


class Nothing(nn.Module):
    """No parameter."""

    def __init__(self, r: random.Random) -> None:
        super().__init__()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x)


class Recomputed(nn.Module):
    """A part that torch's checkpoint recomputes."""

    is_reentrant = False

    def __init__(self, r: random.Random) -> None:
        super().__init__()
        self.part = r.choice([Mlp, Attention, Twice])(r)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.part, x, use_reentrant=self.is_reentrant)


class Other(nn.Module):
    """Parameters of another dtype than the rest."""

    def __init__(self, r: random.Random) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.empty(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x.to(self.layer.weight.dtype)).to(x.dtype) * self.gain


class Aux(nn.Module):
    """A loss that leaves by an attribute."""

    aux: torch.Tensor | None = None

    def __init__(self, r: random.Random) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.number = nn.Parameter(torch.empty(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(x)
        self.aux = y.square().mean() + self.number.sum().square()
        return y


PARTS: list[Callable[[random.Random], nn.Module]] = [
    *[Mlp, Attention, TorchAttention, Norm, Scale, Pieces, Twice, Experts],
    *[Positions, Own, Aside, Counting, Nothing, Recomputed, Other, Aux],
]


class Sign(enum.Enum):
    """By what the table is multiplied."""

    PLUS = 1
    MINUS = -1


@dataclass(frozen=True)
class Options:
    """Plain values that layers get; they change from step to step."""

    scale: float
    sign: Sign


class Layer(nn.Module):
    """Up to three parts after one another; ``shape`` says in what the hidden state comes and goes.

    ``mask`` has the batch as dim 0; ``table`` is one for all rows, and may have as many rows as the
    batch. Outside of the layer the hidden state is (positions, batch, features) if
    :attr:`is_sequence_first`.
    """

    is_sequence_first = False

    def __init__(
        self, r: random.Random, shape: str, kinds: Sequence[Callable[[random.Random], nn.Module]]
    ) -> None:
        super().__init__()
        self.parts = nn.ModuleList([r.choice(kinds)(r) for _ in range(r.randint(0, 3))])
        self.shape = shape

    def forward(
        self,
        state: Any,
        mask: Any = None,
        table: Any = None,
        options: Options | None = None,
        *,
        hidden: Any = None,
    ) -> Any:
        x = {
            "tensor": lambda: state,
            "tuple": lambda: state[0],
            "dict": lambda: state["x"],
            "keyword": lambda: hidden,
        }
        out = x[self.shape]()
        if self.is_sequence_first:
            out = out.transpose(0, 1)
        if options is not None:
            out = out + options.scale * options.sign.value * mask * table
        for part in self.parts:
            out = out + 0.5 * part(out)
        if self.is_sequence_first:
            out = out.transpose(0, 1)
        return {"tensor": out, "tuple": (out, None, 3), "dict": {"x": out}, "keyword": [out]}[
            self.shape
        ]

    def take_aux(self) -> Any:
        """Return the sum of the losses on the side of the last call."""
        found = [part for part in self.parts if isinstance(part, Aux)]
        total = sum((part.aux for part in found if part.aux is not None), 0.0)
        for part in found:
            part.aux = None
        return total

    def run(self, x: torch.Tensor, *extras: Any) -> torch.Tensor:
        """Call the layer and return its hidden state."""
        if extras:
            only: torch.Tensor = self(x, *extras)
            return only
        if self.shape == "keyword":
            return self(None, hidden=x)[0]
        out = self({"tensor": x, "tuple": (x,), "dict": {"x": x}}[self.shape])
        return {"tensor": lambda: out, "tuple": lambda: out[0], "dict": lambda: out["x"]}[
            self.shape
        ]()


class Model(nn.Module):
    """An embedding, ``layers`` in the order that is asked for, and a head, which may be
    the embedding.

    ``tp`` divides the vocabulary and the hidden widths, so that they can be cut. If there are
    ``parts`` of a pipeline, each has a layer, and nothing leaves a layer but what it returns.
    """

    aux: Any = 0.0
    gives_extras = False
    options = Options(1.0, Sign.PLUS)

    def __init__(
        self,
        r: random.Random,
        dtype: torch.dtype,
        *,
        tensors_only: bool,
        may_tie: bool,
        tp: int,
        parts: int | None,
    ) -> None:
        super().__init__()
        shapes = ["tensor"] if tensors_only else ["tensor", "tuple", "dict", "keyword"]
        vocabulary = -(-TOKENS // tp) * tp
        self.embedding = nn.Embedding(vocabulary, WIDTH)
        kinds = PARTS if tp == 1 else [*PARTS, *[Mlp, Attention] * 4]
        if parts is not None:
            kinds = [kind for kind in kinds if kind not in (Aux, Counting)]
        least = parts or 1
        count = r.randint(least, least + 3)
        self.layers = nn.ModuleList([Layer(r, r.choice(shapes), kinds) for _ in range(count)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, vocabulary, bias=r.random() < 0.5)
        if r.random() < 0.5:
            self.head.weight = self.embedding.weight
        mlps = [module for module in self.layers.modules() if isinstance(module, Mlp)]
        if tp > 1:
            for mlp in mlps:
                mlp.widen(tp)
        if may_tie and len(mlps) > 1:
            first, second = r.sample(mlps, 2)
            if first.up.weight.shape == second.up.weight.shape:
                first.up.weight = second.up.weight
        self.to(dtype)
        for other in [module for module in self.modules() if isinstance(module, Other)]:
            other.layer.to(torch.float32 if dtype == torch.float64 else torch.float64)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.normal_(std=0.4)

    def forward(self, tokens: torch.Tensor, order: list[int]) -> torch.Tensor:
        """Return logits; the losses on the side are in :attr:`aux`."""
        x = self.embedding(tokens)
        extras = extras_of(self, tokens) if self.gives_extras else ()
        self.aux = 0.0
        if order == list(range(len(self.layers))) and not isinstance(self.layers, nn.ModuleList):
            x = self.layers(x)
            self.aux = sum((layer.take_aux() for layer in self.layers), 0.0)
        else:
            for index in order:
                layer: Any = self.layers[index]
                x = layer.run(x, *extras)
                self.aux = self.aux + layer.take_aux()
        return self.head(self.norm(x))


def extras_of(model: Any, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Options]:
    """Return what layers get besides the hidden state."""
    weight: torch.Tensor = model.embedding.weight
    return (tokens[:, :1, None] % 3).to(weight.dtype), weight[:LENGTH], model.options
