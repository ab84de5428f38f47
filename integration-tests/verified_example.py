"""The example's GPT for ``bmt verify``: beside it, the same GPT in plain torch.

PYTHONPATH=examples/gpt:integration-tests bmt verify verified_example:PlainGPT \\
    --loss next_token_loss --parallelize as_example
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn

import bmtrain as bmt
from models import GPT

SIZES: dict[str, Any] = {
    "num_layers": 2,
    "vocab_size": 62,
    "dim_model": 24,
    "dim_head": 8,
    "num_heads": 2,
    "dim_ff": 50,
    "max_distance": 12,
}


class PlainBlock(nn.Module):
    """Attention spelled out, as the definition has it."""

    def __init__(self, dim: int, heads: int, dim_head: int, dim_ff: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_attn = nn.LayerNorm(dim)
        self.attn = nn.ModuleDict(
            {
                "project_qkv": nn.Linear(dim, 3 * heads * dim_head),
                "project_out": nn.Linear(heads * dim_head, dim),
            }
        )
        self.ln_ff = nn.LayerNorm(dim)
        self.ff = nn.ModuleDict({"w_in": nn.Linear(dim, dim_ff), "w_out": nn.Linear(dim_ff, dim)})

    def forward(self, hidden: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
        heads = []
        query, key, value = self.attn["project_qkv"](self.ln_attn(hidden)).chunk(3, dim=-1)
        for q, k, v in zip(
            *(each.chunk(self.heads, dim=-1) for each in (query, key, value)), strict=True
        ):
            scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~visible, -torch.inf)
            heads.append(scores.softmax(-1) @ v)
        hidden = hidden + self.attn["project_out"](torch.cat(heads, dim=-1))
        x = self.ff["w_in"](self.ln_ff(hidden))
        gelu = 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))
        hidden = hidden + self.ff["w_out"](gelu)
        return hidden


class PlainGPT(nn.Module):
    """The same GPT, in plain torch and in one process."""

    def __init__(self, num_layers: int = SIZES["num_layers"]) -> None:
        super().__init__()
        dim = SIZES["dim_model"]
        self.input_embedding = nn.Embedding(SIZES["vocab_size"], dim)
        self.position_embedding = nn.Embedding(SIZES["max_distance"], dim)
        self.transformers = nn.ModuleList(
            PlainBlock(dim, SIZES["num_heads"], SIZES["dim_head"], SIZES["dim_ff"])
            for _ in range(num_layers)
        )
        self.layernorm = nn.LayerNorm(dim)
        torch.manual_seed(3)
        for name, parameter in self.named_parameters():
            if "embedding" in name:
                nn.init.normal_(parameter, std=0.05)
            elif parameter.dim() == 2:
                nn.init.xavier_normal_(parameter, gain=0.2 if "out" in name else 1.0)
            else:
                nn.init.constant_(
                    parameter, 1.0 if re.search(r"(ln_\w+|layernorm)\.weight", name) else 0.0
                )

    def forward(
        self, input_ids: torch.Tensor, pos: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        length = input_ids.shape[1]
        visible = torch.zeros(len(input_ids), length, length, dtype=torch.bool)
        for row in range(len(input_ids)):
            for reader in range(length):
                for read in range(length):
                    is_before = pos[row, read] <= pos[row, reader] and mask[row, read]
                    visible[row, reader, read] = is_before or reader == read
        visible = visible.to(input_ids.device)
        hidden = self.input_embedding(input_ids) + self.position_embedding(pos)
        for block in self.transformers:
            hidden = block(hidden, visible)
        logits: torch.Tensor = self.layernorm(hidden) @ self.input_embedding.weight.T
        return logits


def batch(seed: int) -> tuple[torch.Tensor, ...]:
    """Return eight sequences of several lengths, padded: tokens, positions, and a mask."""
    tokens = torch.randint(SIZES["vocab_size"], (8, SIZES["max_distance"]))
    pos = torch.arange(SIZES["max_distance"]).expand(8, -1)
    return tokens, pos, pos < torch.randint(4, SIZES["max_distance"] + 1, (8, 1))


def next_token_loss(logits: torch.Tensor, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Return the cross entropy of each token after the first that is no padding, by the number
    of all. Ranks along ``tp`` have parts of the vocabulary.
    """
    tokens, _, mask = batch
    targets = tokens[:, 1:].masked_fill(~mask[:, 1:], -100)
    loss_of: nn.Module = nn.CrossEntropyLoss(reduction="sum")
    if bmt.is_initialized() and bmt.current().topology.axis_size("tp") > 1:
        loss_of = bmt.loss.FusedCrossEntropy(reduction="sum", parallel=True)
    loss: torch.Tensor = loss_of(logits[:, :-1].flatten(0, 1), targets.flatten())
    return loss / targets.numel()


def as_example(plain: Any, use_checkpoint: bool = True) -> nn.Module:
    """Return the example's GPT with the values of ``plain``."""
    dtype = plain.layernorm.weight.dtype
    made = GPT(**SIZES, dtype=dtype, use_checkpoint=use_checkpoint)
    made.load_state_dict(plain.state_dict())
    return made


def as_example_without_checkpoints(plain: Any) -> nn.Module:
    return as_example(plain, use_checkpoint=False)
