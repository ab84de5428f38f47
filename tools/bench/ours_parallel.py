"""bmt-tp: the units of ``models.py`` with bmt's tensor-parallel layers, in Blocks over all
other ranks.
"""

from __future__ import annotations

import torch
from torch import nn

import bmtrain as bmt
from bench.case import Case
from bench.models import Embeddings, Head, Size, TransformerBlock
from bench.ours import Bmt
from bench.sequence_first import SequenceFirstBlock, sequence_first_values, tensor_ranks
from bmt_tp import ColumnParallelLinear, RowParallelLinear, VPEmbedding


class BmtParallel(Bmt):
    """Column- and row-parallel layers, vocabulary-parallel embedding, head and loss."""

    name = "bmt-tp"

    def parallel(self, unit: nn.Module, case: Case, device: torch.device) -> nn.Module:
        """See :meth:`Bmt.parallel`."""
        return parallel_unit(unit, case.gpt, device)

    def data_ranks(self) -> list[int]:
        """See :meth:`Training.data_ranks`."""
        return tensor_ranks()

    def loss(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """See :meth:`Training.loss`. The logits are this rank's slice of the vocabulary, in the
        order (batch, length).
        """
        cross_entropy = bmt.loss.FusedCrossEntropy(parallel=True)
        loss: torch.Tensor = cross_entropy(logits.reshape(-1, logits.shape[-1]), targets.flatten())
        return loss


class ParallelBlock(SequenceFirstBlock):
    """The block with rows (sequence / tp, batch, hidden) outside, and heads / tp inside."""

    def __init__(self, size: Size, dtype: torch.dtype) -> None:
        super().__init__(size, dtype)
        self.qkv = ColumnParallelLinear(size.dim_model, 3 * size.dim_model, dtype=dtype)
        self.attention_out = RowParallelLinear(size.dim_model, size.dim_model, dtype=dtype)
        self.up = ColumnParallelLinear(size.dim_model, size.dim_ff, dtype=dtype)
        self.down = RowParallelLinear(size.dim_ff, size.dim_model, dtype=dtype)


class ParallelEmbeddings(nn.Module):
    """Embeddings of this rank's part of the sequence."""

    def __init__(self, size: Size, dtype: torch.dtype) -> None:
        super().__init__()
        self.token = VPEmbedding(size.vocabulary, size.dim_model, dtype=dtype)
        self.position = nn.Embedding(size.sequence, size.dim_model, dtype=dtype)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Take (batch, length) to (length / tp, batch, dim_model)."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        own_tokens, own_positions = (
            bmt.utils.tp_split_tensor(whole, 0) for whole in (tokens.t(), positions)
        )
        hidden: torch.Tensor = self.token(own_tokens) + self.position(own_positions).unsqueeze(1)
        return hidden


class ParallelHead(Head):
    """The head, of this rank's slice of the vocabulary."""

    def __init__(self, size: Size, dtype: torch.dtype) -> None:
        super().__init__(size, dtype)
        self.logits = VPEmbedding(size.vocabulary, size.dim_model, dtype=dtype)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Take (length / tp, batch, dim_model) to logits of the whole length and vocabulary / tp,
        in the order (batch, length).
        """
        logits: torch.Tensor = self.logits(self.norm(hidden), projection=True)
        return logits.transpose(0, 1)


def parallel_unit(unit: nn.Module, size: Size, device: torch.device) -> nn.Module:
    """Return the parallel counterpart of ``unit`` of ``models.py``, with its values."""
    kinds = {TransformerBlock: ParallelBlock, Embeddings: ParallelEmbeddings, Head: ParallelHead}
    with device:
        made = kinds[type(unit)](size, next(unit.parameters()).dtype)
    made.load_state_dict(sequence_first_values(unit, size))
    return made
