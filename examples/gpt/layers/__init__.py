"""The layers of the GPT. Each is written as for one process; ``bmt.DistributedParameter`` is all that makes it sharded."""

from .attention import Attention
from .embedding import Embedding
from .feedforward import FeedForward
from .layernorm import LayerNorm
from .linear import Linear

__all__ = ["Attention", "Embedding", "FeedForward", "LayerNorm", "Linear"]
