"""``Embedding``: a vector for each position."""

from __future__ import annotations

import torch
import torch.nn.functional as F

import bmtrain as bmt


class Embedding(bmt.DistributedModule):
    """A table of ``num_embeddings`` vectors, normally distributed with ``init_std`` at
    the start.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        dtype: torch.dtype | None = None,
        *,
        init_std: float = 1.0,
    ) -> None:
        super().__init__()
        self.weight = bmt.DistributedParameter(
            torch.empty(num_embeddings, embedding_dim, dtype=dtype),
            init_method=bmt.ParameterInitializer(torch.nn.init.normal_, mean=0.0, std=init_std),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Look up the ids ``x``."""
        return F.embedding(x, self.weight)
