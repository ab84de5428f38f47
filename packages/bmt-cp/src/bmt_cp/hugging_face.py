"""``attn_implementation="bmt_cp"``: attention of models of Hugging Face goes through
:func:`bmt_cp.attention`, by transformers' own registry of attention functions.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

from bmt_core.errors import ConfigError
from bmt_cp.context_attention import attention
from bmt_cp.context_group import context_group
from bmt_cp.guards import HUGGING_FACE_NAME, CallFacts

_REGISTRY = "transformers.modeling_utils"
_WINDOW = "_bmt_window"  # attribute of a layer's attention
_UNKNOWN = ("softcap", "s_aux", "position_bias", "cache", "attention_sink", "head_mask")
_MASKS = {
    *("and_masks", "causal_mask_function", "bidirectional_mask_function"),
    *("sliding_window_overlay", "sliding_window_bidirectional_overlay"),
    *("packed_sequence_mask_function", "remap_positions_for_packed_sequence"),
}  # of transformers, for the masks that bmt_cp.attention computes


class _Registration(MetaPathFinder):
    """Registers as soon as the program has imported the registry of transformers."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _REGISTRY:
            return None
        others = (each for each in sys.meta_path if each is not self)
        found = (each.find_spec(fullname, path, target) for each in others)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_register(module: ModuleType) -> None:
                execute(module)
                _register()

            spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec


_registration = _Registration()


def register() -> None:
    """Make ``attn_implementation="bmt_cp"`` known to transformers, now or when the program imports
    it, which takes seconds.
    """
    if _REGISTRY in sys.modules:
        _register()
    elif _registration not in sys.meta_path:
        sys.meta_path.insert(0, _registration)


def _register() -> None:
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

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
        raise _not_computed(f"{type(module).__name__} asks its attention for {what}")
    window = None if sliding_window else _window_of(module)
    if window is not None and window < key.shape[2] * context_group().size:
        raise _not_computed(
            f"The configuration of {type(module).__name__} has sliding_window={window}, and its"
            " attention does not get it but by a mask"
        )
    if query.shape[2] != key.shape[2]:
        raise _not_computed(
            f"{type(module).__name__} asks for attention to other tokens, such as those of a cache"
        )
    positions = further.get("position_ids")
    if positions is not None and _looks_at_positions(module, document_ids):
        _check_positions(positions, key.shape[2] // 2)
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


def _looks_at_positions(module: torch.nn.Module, document_ids: torch.Tensor | None) -> bool:
    """Whether it is the model's first call, or one of an evaluation, where no gradients tell that
    a batch was not divided. It waits for the device.
    """
    if CallFacts.is_first_call:
        return not CallFacts.has_documents
    evaluates = CallFacts.ranks > 1 and not module.training and not torch.compiler.is_compiling()
    return evaluates and document_ids is None


def _not_computed(what: str) -> ConfigError:
    return ConfigError(
        f'{what}, which attn_implementation="{HUGGING_FACE_NAME}" does not compute: it knows causal'
        " and full attention, sliding windows and packed documents."
    )


def _window_of(module: torch.nn.Module) -> int | None:
    # Asked once: compiled code that reads layer_idx is compiled again for each layer.
    if not hasattr(module, _WINDOW):
        config, number = getattr(module, "config", None), getattr(module, "layer_idx", None)
        types = getattr(config, "layer_types", None)
        is_full = types and number is not None and types[number] != "sliding_attention"
        setattr(module, _WINDOW, None if is_full else getattr(config, "sliding_window", None))
    window: int | None = getattr(module, _WINDOW)
    return window


def _check_positions(positions: torch.Tensor, chunk: int) -> None:
    group, heads, tails = context_group(), positions[..., 0], positions[..., chunk]
    between = (2 * group.size - 1 - 2 * group.rank) * chunk
    wrong = (tails != heads + between) & (tails != 0)  # 0 is padding
    wrong |= (heads < group.rank * chunk) & (chunk > 1)
    if bool(wrong.any()):
        raise ConfigError(
            f"This rank's chunks begin at the positions {heads.tolist()} and {tails.tolist()}, and"
            f" must be {between} apart. Call the model with all of bmt.cp.split: model(**part)."
        )


def _names_in(function: Any) -> set[str]:
    """Return the names of ``function`` and of those that it is made of."""
    cells = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    inner = [each for found in cells for each in (found if isinstance(found, tuple) else (found,))]
    name = function.__qualname__.partition(".")[0]
    return {name}.union(*(_names_in(each) for each in inner if callable(each)))


def no_mask(*args: Any, attention_mask: Any = None, mask_function: Any = None, **_: Any) -> None:
    """Return no mask: :func:`bmt_cp.attention` masks. ConfigError for a mask of another kind."""
    if mask_function is not None and (unknown := sorted(_names_in(mask_function) - _MASKS)):
        raise _not_computed(f"The model makes a mask by {', '.join(unknown)}")
    if attention_mask is not None:
        raise ConfigError(
            f'attn_implementation="{HUGGING_FACE_NAME}" takes no attention_mask. Pad at the end and'
            " give padding the label -100, or pack documents: bmt.cp.split(document_ids=...)."
        )
