"""What the scripts share: a layer in BMTrain's style, words that count up, which a model learns in
a few steps, and their end.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

import bmtrain as bmt

WORDS, LENGTH, BATCH, WIDTH = 32, 12, 4, 32


def own_batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return words (batch, length) and those that follow them, on the run's device; every rank
    has others.
    """
    generator = torch.Generator().manual_seed(step * bmt.world_size() + bmt.rank())
    start = torch.randint(WORDS, (BATCH, 1), generator=generator)
    words = ((start + torch.arange(LENGTH + 1)) % WORDS).to(bmt.current().device)
    return words[:, :-1], words[:, 1:]


class Layer(bmt.DistributedModule):
    """Each position is mixed with the mean of those before it. (batch, length, width) to the
    same shape.
    """

    def __init__(self, width: int = WIDTH, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        ones = bmt.ParameterInitializer(torch.nn.init.ones_)
        self.gain = bmt.DistributedParameter(torch.empty(width, dtype=dtype), init_method=ones)
        self.up = bmt.nn.Linear(2 * width, 4 * width, dtype=dtype)
        self.down = bmt.nn.Linear(4 * width, width, dtype=dtype)

    def forward(self, hidden: torch.Tensor, keep: torch.Tensor | None = None) -> torch.Tensor:
        """``keep`` (batch, length): the positions that count; None: all."""
        normed = F.rms_norm(hidden.float(), hidden.shape[-1:]).to(hidden.dtype) * self.gain
        if keep is not None:
            normed = normed * keep[..., None]
        counts = torch.arange(1, hidden.shape[1] + 1, device=hidden.device)[:, None]
        means = (normed.float().cumsum(1) / counts).to(hidden.dtype)
        output: torch.Tensor = hidden + self.down(
            F.gelu(self.up(torch.cat([normed, means], dim=-1)))
        )
        return output


class Embedding(bmt.DistributedModule):
    """A vector for each of ``count`` ids, which also scores them."""

    def __init__(
        self, count: int = WORDS, width: int = WIDTH, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        normal = bmt.ParameterInitializer(torch.nn.init.normal_, std=0.3)
        self.weight = bmt.DistributedParameter(
            torch.empty(count, width, dtype=dtype), init_method=normal
        )

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Look up ``ids``."""
        return F.embedding(ids, self.weight)

    def scores(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits (batch, length, count) in float32."""
        return F.linear(hidden, self.weight).float()


def mean_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy of logits (batch, length, words)."""
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


def run(main: Callable[[], Any]) -> None:
    """Run ``main``, and end with one line where a number of ranks, say, does not fit;
    ``--traceback`` shows where.
    """
    try:
        main()
    except (bmt.BmtError, ValueError, OSError) as error:
        if "--traceback" in sys.argv:
            raise
        sys.exit(
            f"{os.path.basename(sys.argv[0])}, rank {os.environ.get('RANK', 0)}:"
            f" {type(error).__name__}: {error}"
        )
