"""The layers of the GPT, for one rank's part of the sequence. With ``tp_size=1`` that is the whole,
and they are ordinary layers.

Sizes in docstrings: ``length / tp`` is this rank's part of the positions, which are dim 0.
"""

from .attention import Attention
from .embedding import Embedding
from .feedforward import FeedForward
from .layernorm import LayerNorm
from .linear import RowParallelLinear

__all__ = ["Attention", "Embedding", "FeedForward", "LayerNorm", "RowParallelLinear"]
