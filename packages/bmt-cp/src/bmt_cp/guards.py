"""Finds models whose tokens would not see each other, because they are on other ranks along ``cp``.

A model that computes attention by itself, or a convolution over time, would do so over a rank's own
tokens: it would train another model, and nothing would fail. So the first call of each model is
looked at. What mixes tokens and does not pass by :func:`bmt_cp.attention` is an error that names
it. A module that computes each token by itself, whatever its class, says ``token_wise = True``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import flex_attention
from torch.overrides import TorchFunctionMode

from bmt_core.comm.annotate import PLACES
from bmt_core.errors import ConfigError
from bmt_params.models_of_run import CallEnd

HUGGING_FACE_NAME = "bmt_cp"
_MIXERS = (
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d),
    *(nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention),
)
# What transformers' embeddings have that count positions from the one after padding, as RoBERTa.
_OFFSET_POSITIONS = "create_position_ids_from_inputs_embeds"
_OF_ONE_TOKEN = ("ForSequenceClassification", "ForMultipleChoice")
_LAYER_TYPES = {"full_attention", "sliding_attention"}
_inside = 0


class CallFacts:
    """What the checks of a first call know; of this process, not of an object."""

    ranks = 1
    """The number of ranks along ``cp``: compiled code is made for it."""
    tokens = 0
    """Tokens of the last part that ``split`` has returned."""
    has_documents = False
    """Whether that part has documents."""
    has_own_positions = False
    """Whether that part has positions that the program gave."""
    with_documents, without = 0, 0
    """Calls of ``attention`` since the last first call began."""
    is_first_call = False
    """Whether the first call of a model runs."""


@contextmanager
def inside_attention(*, has_documents: bool) -> Iterator[None]:
    """Inside, torch's attention may be called: it gets the tokens of all ranks."""
    global _inside
    _inside += 1
    CallFacts.with_documents += has_documents
    CallFacts.without += not has_documents
    try:
        yield
    finally:
        _inside -= 1


class FirstCalls:
    """Looks at the first call of each model; see the module's docstring."""

    def __init__(self) -> None:
        self._seen: WeakSet[nn.Module] = WeakSet()

    def begin(self, module: nn.Module) -> CallEnd:
        """Look at the call of ``module`` that begins, if it is its first one."""
        if module in self._seen or torch.compiler.is_compiling():
            return lambda parameters: None
        check_modules(module)
        mode: Any = _RefusesAttention()
        mode.is_hugging_face = any(hasattr(m, "loss_function") for m in module.modules())
        mode.__enter__()
        # Compiled code is not looked at, so this call is not compiled.
        eager = torch.compiler.set_stance("force_eager")
        eager.__enter__()
        CallFacts.with_documents, CallFacts.without, CallFacts.is_first_call = 0, 0, True

        def end(parameters: Sequence[torch.Tensor] | None) -> None:
            eager.__exit__(None, None, None)
            mode.__exit__(None, None, None)
            CallFacts.is_first_call = False
            lost = CallFacts.has_documents and CallFacts.without and not CallFacts.with_documents
            if lost and parameters is not None:
                raise ConfigError(
                    "bmt.cp.split returned document_ids, which no attention of the model gets, so"
                    " that documents or padding would be seen: bmt.cp.attention(document_ids=...)."
                    " A model of Hugging Face must pass on further arguments of its forward."
                )
            if parameters is not None:  # a call that has failed may have been refused
                self._seen.add(module)

        return end


def check_modules(model: nn.Module) -> None:
    """Raise :class:`ConfigError` if a module of ``model`` mixes tokens by its class, or is one of
    Hugging Face with another attention or other positions.
    """
    for name, module in _not_token_wise(model):
        config = getattr(module, "config", None)
        chosen = getattr(config, "_attn_implementation", None)
        if chosen not in (None, HUGGING_FACE_NAME):
            raise ConfigError(
                f"{_named(name, module)} has attn_implementation={chosen!r}, which would see this"
                f" rank's tokens only. Load the model with"
                f' attn_implementation="{HUGGING_FACE_NAME}".'
            )
        types = set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES
        found = [f"layers of the type {kind}" for kind in sorted(types)]
        found += ["own attention"] * (getattr(module, "_supports_attention_backend", True) is False)
        found += ["a loss of its routers"] * (getattr(config, "output_router_logits", 0) is True)
        found += ["logits of one token"] * type(module).__name__.endswith(_OF_ONE_TOKEN)
        if found:
            raise ConfigError(
                f"{_named(name, module)} has {' and '.join(found)}, which would see this rank's"
                " tokens only. Take a model without, or output_router_logits=False."
            )
        if hasattr(module, _OFFSET_POSITIONS) and not CallFacts.has_own_positions:
            first = getattr(module, "padding_idx", 0) + 1
            raise ConfigError(
                f"{_named(name, module)} counts positions from {first}, and those of bmt.cp.split"
                f" begin with 0: give split(position_ids=...) that begin with {first}."
            )
        if isinstance(module, _MIXERS) and not _takes_one_token(module):
            raise ConfigError(
                f"{_named(name, module)} mixes the tokens of a sequence, which is divided over the"
                " ranks along cp: it would see this rank's tokens only. Attention goes through"
                " bmt.cp.attention. If the module computes each token by itself, set"
                " token_wise = True on it."
            )


def _takes_one_token(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.conv._ConvNd) and set(module.kernel_size) == {1}


def _not_token_wise(module: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    if getattr(module, "token_wise", False) is True:
        return
    yield name, module
    for child_name, child in module.named_children():
        yield from _not_token_wise(child, f"{name}.{child_name}" if name else child_name)


def _named(name: str, module: nn.Module) -> str:
    kind = type(module).__name__
    return f"{name} ({kind})" if name else kind


class _RefusesAttention(TorchFunctionMode):
    is_hugging_face = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        place = f" {PLACES.now}" if PLACES.now else ""
        is_of_tokens = (
            func in _SOFTMAX
            and args
            and args[0].dim() > 2
            and args[0].shape[-2:] == (CallFacts.tokens, CallFacts.tokens)
        )
        if (func in _ATTENTION or is_of_tokens) and not _inside:
            raise ConfigError(
                f"The model calls torch's {func.__name__}{place} for attention, which would see"
                " this rank's tokens only. Along cp a sequence is divided over ranks: call"
                " bmt.cp.attention(query, key, value, causal=...) in its place."
            )
        is_mean = func is _CROSS_ENTROPY and (kwargs or {}).get("reduction", "mean") == "mean"
        if is_mean and self.is_hugging_face:
            raise ConfigError(
                f"The model computes the mean loss of this rank's tokens{place}. Call it without"
                " labels, and sum losses of its logits and part['shift_labels']."
            )
        return func(*args, **(kwargs or {}))


# bmt-zero may have put functions of its own in place of torch's, which call these.
_ATTENTION: set[Callable[..., Any]] = {
    inspect.unwrap(F.scaled_dot_product_attention),
    F.multi_head_attention_forward,
    inspect.unwrap(flex_attention),
}
_SOFTMAX: set[Callable[..., Any]] = {F.softmax, torch.softmax, torch.Tensor.softmax}
_CROSS_ENTROPY = inspect.unwrap(F.cross_entropy)
