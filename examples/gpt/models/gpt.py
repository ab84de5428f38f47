"""``GPT``: a language model of pre-norm transformer blocks, with input and output embeddings tied.

Between layers, activations are (length / tp, batch, dim_model), where ``tp`` is the ``tp_size`` of
the run. Sequence first, so that each rank along ``tp`` has its part of the positions, and a batch
of 1 can be cut, too. The blocks are divided over the ``pipe_size`` stages of the run; with one
stage they are an ordinary list.
"""

from __future__ import annotations

import torch

import bmtrain as bmt
from bmt_pipeline import PipelineModel
from layers import Attention, Embedding, FeedForward, LayerNorm
from layers.float8 import use_float8

# Small embeddings and small outputs of the blocks: the first logits are near zero, so the first
# loss is near ln(vocab_size), and the first gradients pass the blocks almost unchanged.
EMBEDDING_STD = 0.05
BLOCK_OUTPUT_GAIN = 0.2


class TransformerEncoder(bmt.DistributedModule):
    """One block: attention and feed-forward, each normalised before and added to what it reads."""

    def __init__(
        self,
        dim_model: int,
        dim_head: int,
        num_heads: int,
        dim_ff: int,
        bias: bool = True,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        gain = BLOCK_OUTPUT_GAIN
        self.ln_attn = LayerNorm(dim_model, bias=bias, dtype=dtype)
        self.attn = Attention(
            dim_model, dim_head, num_heads, bias=bias, dtype=dtype, output_gain=gain
        )
        self.ln_ff = LayerNorm(dim_model, bias=bias, dtype=dtype)
        self.ff = FeedForward(dim_model, dim_ff, bias=bias, dtype=dtype, output_gain=gain)

    def forward(self, hidden: torch.Tensor, visible: torch.Tensor | None = None) -> torch.Tensor:
        """Take (length / tp, batch, dim_model) to the same shape; ``visible`` as
        in :class:`Attention`.
        """
        hidden = hidden + self.attn(self.ln_attn(hidden), visible)
        hidden = hidden + self.ff(self.ln_ff(hidden))
        return hidden


class GPT(PipelineModel):
    """The GPT of BMTrain's example. ``use_checkpoint``, ``zero_level`` and ``compile`` are those of
    every block: see ``bmt.Block``.

    ``float8``: a recipe of torchao, by which the linear layers of the blocks compute; see
    :func:`layers.float8.use_float8`. ``chunks``: into how many parts the blocks of one stage are
    cut, for schedules that want several. ``tp`` must divide ``num_heads``, ``dim_ff``,
    ``vocab_size`` and the length of what it is called with.
    """

    def __init__(
        self,
        num_layers: int,
        vocab_size: int,
        dim_model: int,
        dim_head: int,
        num_heads: int,
        dim_ff: int,
        max_distance: int,
        bias: bool = True,
        dtype: torch.dtype | None = None,
        *,
        use_checkpoint: bool = True,
        zero_level: int | None = None,
        compile: bool = False,
        float8: str | None = None,
        chunks: int = 1,
    ) -> None:
        super().__init__()
        self.max_distance = max_distance
        self.input_embedding = bmt.nn.VPEmbedding(
            vocab_size, dim_model, dtype=dtype or torch.get_default_dtype(), init_std=EMBEDDING_STD
        )
        self.position_embedding = Embedding(
            max_distance, dim_model, dtype=dtype, init_std=EMBEDDING_STD
        )

        def make_block() -> torch.nn.Module:
            block = TransformerEncoder(dim_model, dim_head, num_heads, dim_ff, bias, dtype)
            if float8 is not None:
                use_float8(block, float8)
            return bmt.Block(
                block,
                use_checkpoint=use_checkpoint,
                zero_level=zero_level,
                compile=compile,
                mode="PIPE",
            )

        # Functions, not blocks: each stage makes its own blocks and no others.
        self.transformers = bmt.PipelineTransformerBlockList(
            [make_block] * num_layers, batch_dim=1, chunks=chunks
        )
        self.layernorm = LayerNorm(dim_model, bias=bias, dtype=dtype)

    def before_layers(
        self, input_ids: torch.Tensor, pos: torch.Tensor, mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the first hidden states for ``input_ids`` (batch, length), and which positions
        see which.

        What is passed is alike on all ranks along ``tp``.

        ``pos`` (batch, length) are the positions, below ``max_distance``. ``mask`` (batch, length)
        is False at padding, which no other position reads; what comes out there means nothing.
        None: no padding, and ``pos`` ascends, which is faster.
        """
        visible = None
        if mask is not None:
            visible = mask[:, None, :] & (pos[:, None, :] <= pos[:, :, None])
            # Padding reads itself: the softmax over nothing is not a number, and would reach the
            # parameters' gradients.
            visible = visible | torch.eye(pos.shape[1], dtype=torch.bool, device=pos.device)
        hidden = self.input_embedding(own_positions(input_ids)) + self.position_embedding(
            own_positions(pos)
        )
        return hidden, visible

    def after_layers(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits (batch, length, vocab_size / tp) of the token after each; of this rank's
        part of the vocabulary.
        """
        logits: torch.Tensor = self.input_embedding(self.layernorm(hidden), projection=True)
        return logits.transpose(0, 1)


def own_positions(x: torch.Tensor) -> torch.Tensor:
    """Return this rank's positions of ``x`` (batch, length), as (length / tp, batch)."""
    tp, index = bmt.config["tp_size"], bmt.config["tp_rank"]
    length = x.shape[1]
    if length % tp != 0:
        raise ValueError(
            f"The sequences have {length} positions, which is not a multiple of tp_size={tp}."
            " Pad them."
        )
    own: torch.Tensor = x.t().chunk(tp)[index]
    return own
