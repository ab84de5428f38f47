"""The GPT that every toolkit trains: plain torch modules, built on the device unit by unit and
sharded as they appear.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

INIT_STD = 0.02
SEED = 1234


@dataclass(frozen=True, kw_only=True)
class Size:
    """Shape of a model, and the length of the sequences that it is trained on."""

    num_layers: int
    dim_model: int
    num_heads: int
    dim_ff: int
    vocabulary: int
    sequence: int

    def units(self, dtype: torch.dtype) -> Iterator[nn.Module]:
        """Yield the embeddings, the blocks and the head, on the device "meta", where they have
        no values.
        """
        kinds: list[Callable[[Size, torch.dtype], nn.Module]]
        kinds = [Embeddings, *[TransformerBlock] * self.num_layers, Head]
        for make in kinds:
            with torch.device("meta"):
                unit = make(self, dtype)
            yield unit

    def num_parameters(self) -> int:
        """Number of elements of all parameters.

        >>> SIZES["tiny"].num_parameters()
        164928
        """
        return sum(p.numel() for unit in self.units(torch.float32) for p in unit.parameters())


GATHERED = "tensorwise_gathered"
"""The recipe of float8 with one scale per tensor, and gathers in float8."""
SIZES = {
    "tiny": Size(num_layers=3, dim_model=64, num_heads=4, dim_ff=256, vocabulary=100, sequence=32),
    "narrow": Size(  # so small that the device waits for the host
        num_layers=24, dim_model=256, num_heads=4, dim_ff=1024, vocabulary=1000, sequence=128
    ),
    "1b": Size(
        num_layers=24, dim_model=2048, num_heads=32, dim_ff=8192, vocabulary=10240, sequence=512
    ),
    "3b": Size(
        num_layers=16, dim_model=4096, num_heads=32, dim_ff=16384, vocabulary=10240, sequence=2048
    ),
    "7b": Size(
        num_layers=32, dim_model=4096, num_heads=32, dim_ff=16384, vocabulary=10240, sequence=512
    ),
    "13b": Size(
        num_layers=40, dim_model=5120, num_heads=128, dim_ff=20480, vocabulary=10240, sequence=512
    ),
}


class Embeddings(nn.Module):
    """Token and position embeddings."""

    def __init__(self, size: Size, dtype: torch.dtype) -> None:
        super().__init__()
        self.token = nn.Embedding(size.vocabulary, size.dim_model, dtype=dtype)
        self.position = nn.Embedding(size.sequence, size.dim_model, dtype=dtype)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Take (batch, length) to (batch, length, dim_model)."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        hidden: torch.Tensor = self.token(tokens) + self.position(positions)
        return hidden


class TransformerBlock(nn.Module):
    """One pre-norm block: causal attention with a fused projection, and a feed-forward with tanh
    GELU; biases everywhere.
    """

    def __init__(self, size: Size, dtype: torch.dtype) -> None:
        super().__init__()
        self.num_heads = size.num_heads
        self.norm_attention = nn.LayerNorm(size.dim_model, dtype=dtype)
        self.qkv: nn.Module = nn.Linear(size.dim_model, 3 * size.dim_model, dtype=dtype)
        self.attention_out: nn.Module = nn.Linear(size.dim_model, size.dim_model, dtype=dtype)
        self.norm_feed_forward = nn.LayerNorm(size.dim_model, dtype=dtype)
        self.up: nn.Module = nn.Linear(size.dim_model, size.dim_ff, dtype=dtype)
        self.down: nn.Module = nn.Linear(size.dim_ff, size.dim_model, dtype=dtype)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Take (batch, length, dim_model) to the same shape."""
        hidden = hidden + self._attention(self.norm_attention(hidden))
        inner = F.gelu(self.up(self.norm_feed_forward(hidden)), approximate="tanh")
        hidden = hidden + self.down(inner)
        return hidden

    def _attention(self, hidden: torch.Tensor) -> torch.Tensor:
        batch, length, dim = hidden.shape
        split = self.qkv(hidden).view(batch, length, 3, self.num_heads, dim // self.num_heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        attended: torch.Tensor = self.attention_out(
            mixed.transpose(1, 2).reshape(batch, length, dim)
        )
        return attended


class Head(nn.Module):
    """The last norm, and the projection to logits, which shares nothing with the embeddings."""

    def __init__(self, size: Size, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(size.dim_model, dtype=dtype)
        self.logits: nn.Module = nn.Linear(size.dim_model, size.vocabulary, bias=False, dtype=dtype)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Take (batch, length, dim_model) to (batch, length, vocabulary)."""
        logits: torch.Tensor = self.logits(self.norm(hidden))
        return logits


class GPT(nn.Module):
    """Embeddings, blocks and head; ``blocks`` is whatever runs them one after the other."""

    def __init__(self, embeddings: nn.Module, blocks: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.embeddings = embeddings
        self.blocks = blocks
        self.head = head

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Take (batch, length) to logits (batch, length, vocabulary)."""
        logits: torch.Tensor = self.head(self.blocks(self.embeddings(tokens)))
        return logits


def build_gpt(
    size: Size,
    *,
    dtype: torch.dtype,
    rounded_to: torch.dtype,
    device: torch.device,
    shard: Callable[[nn.Module], nn.Module],
    chain: Callable[[list[nn.Module]], nn.Module],
    float8: str | None = None,
) -> GPT:
    """Return the model; each unit is made on ``device``, given its values and handed to ``shard``
    before the next is made.

    So no rank holds more than one whole unit. The values are those of ``rounded_to`` whatever the
    ``dtype`` of the parameters, and the same on every rank and under every toolkit. ``chain`` makes
    one module of the blocks. ``float8``: see :func:`use_float8`.
    """
    units = []
    for number, unit in enumerate(size.units(dtype)):
        unit.to_empty(device=device)
        fill(unit, size, seed=SEED + number, rounded_to=rounded_to)
        if float8 is not None and isinstance(unit, TransformerBlock):
            use_float8(unit, float8, device)
        units.append(shard(unit))
    return GPT(units[0], chain(units[1:-1]), units[-1])


def use_float8(block: nn.Module, recipe: str, device: torch.device) -> None:
    """Let the linear layers in ``block`` compute in float8, by a ``recipe`` of torchao; with
    :data:`GATHERED` weights are gathered in float8, too.

    CPUs have no such products: there numbers are rounded to float8 and multiplied in float32.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    is_gathered = recipe == GATHERED
    config = dataclasses.replace(
        Float8LinearConfig.from_recipe_name("tensorwise" if is_gathered else recipe),
        emulate=device.type == "cpu",
        enable_fsdp_float8_all_gather=is_gathered,
    )
    convert_to_float8_training(block, config=config)


@torch.no_grad()
def fill(unit: nn.Module, size: Size, *, seed: int, rounded_to: torch.dtype) -> None:
    """Give ``unit`` the first values of GPT-2: normal, with smaller outputs of the residual
    branches; biases zero.
    """
    device = next(unit.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    for name, parameter in unit.named_parameters():
        if parameter.dim() == 1:
            parameter.fill_(float("norm" in name and name.endswith("weight")))
            continue
        is_residual_output = name.split(".")[0] in ("attention_out", "down")
        std = INIT_STD / (2 * size.num_layers) ** 0.5 if is_residual_output else INIT_STD
        values = torch.empty(parameter.shape, dtype=rounded_to, device=device)
        parameter.copy_(values.normal_(std=std, generator=generator))
