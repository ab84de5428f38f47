"""``attn_implementation="bmt_cp"``: attention of models of Hugging Face goes through
:func:`bmt_cp.attention`, by transformers' own registry of attention functions.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import Any

import torch

from bmt_core.errors import ConfigError
from bmt_cp.context_attention import attention
from bmt_cp.guards import HUGGING_FACE_NAME

_UNKNOWN = ("softcap", "s_aux", "position_bias", "cache", "attention_sink", "head_mask")


def register(*, imports: bool = False) -> None:
    """Make ``attn_implementation="bmt_cp"`` known to transformers, if the program has imported it,
    or with ``imports`` if it is installed: it takes seconds to import.
    """
    if "transformers" not in sys.modules and not (imports and find_spec("transformers")):
        return
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(HUGGING_FACE_NAME, attention_of_model)
    AttentionMaskInterface.register(HUGGING_FACE_NAME, no_mask)


def attention_of_model(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    document_ids: torch.Tensor | None = None,
    **further: Any,
) -> tuple[torch.Tensor, None]:
    """Compute the attention of ``module`` for transformers; (batch, tokens, heads, size)."""
    asked = [name for name in _UNKNOWN if further.get(name) is not None]
    if attention_mask is not None or asked:
        what = " and ".join(["a mask of its own"] * (attention_mask is not None) + asked)
        raise ConfigError(
            f"{type(module).__name__} asks its attention for {what}, which"
            f' attn_implementation="{HUGGING_FACE_NAME}" does not compute: it knows causal and full'
            " attention, sliding windows and packed documents."
        )
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    found = attention(
        query,
        key,
        value,
        causal=causal,
        document_ids=document_ids,
        window=sliding_window,
        dropout=dropout,
        scale=scaling,
    )
    return found.transpose(1, 2).contiguous(), None


def no_mask(*args: Any, attention_mask: torch.Tensor | None = None, **further: Any) -> None:
    """Return no mask: :func:`bmt_cp.attention` masks by itself. ConfigError for a model that gets
    an ``attention_mask``.
    """
    if attention_mask is not None:
        raise ConfigError(
            f'attn_implementation="{HUGGING_FACE_NAME}" takes no attention_mask. Pad at the end and'
            " give padding the label -100, or pack documents: bmt.cp.split(document_ids=...)."
        )
