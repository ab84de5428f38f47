"""``ModelShape``: what the formulas of memory know of a model. Known models have names; others are
built on the device "meta", from a file of a user or a configuration of transformers.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bmt_core.errors import ConfigError, unknown_name
from bmt_core.packages import PACKAGES

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """What the formulas know of a model. Sizes are in elements."""

    name: str
    layers: int
    hidden: int
    """Features of a token between two layers."""
    block: int
    """Parameters of one layer."""
    outside: int
    """Parameters outside of the layers: embedding, head, last norm."""
    vocabulary: int
    """Logits of a token."""
    attention: int
    """Features that attention returns for a token in one layer."""
    linears: tuple[tuple[int, int], ...]
    """Inputs and outputs of the linear layers that a token passes in one layer; of experts, as
    many as it is sent to."""
    elementwise: int = 0
    """Elements that norms and activation functions save of a token in one layer, beyond inputs and
    outputs of its linear layers; where layers are compiled, none."""

    @property
    def parameters(self) -> int:
        """All parameters."""
        return self.layers * self.block + self.outside

    def with_adapters(self, rank: int) -> int:
        """Parameters of LoRA's adapters on all linear layers: rank x (inputs + outputs) of each
        (Hu et al. 2021, section 4.1).
        """
        return self.layers * rank * sum(map(sum, self.linears))


def decoder(
    name: str,
    *,
    layers: int,
    hidden: int,
    feed_forward: int,
    key_values: int,
    vocabulary: int,
    queries: int | None = None,
    tied: bool = False,
    norms_queries: bool = False,
    experts: int = 0,
    experts_per_token: int = 1,
) -> ModelShape:
    """Return the shape of a decoder like Llama's: attention with ``queries`` and ``key_values``
    features, a gated feed-forward or ``experts`` of them with a router, two norms, no biases; like
    Qwen3's with norms of queries and keys.

    >>> decoder("7B", layers=32, hidden=4096, feed_forward=11008, key_values=4096,
    ...         vocabulary=32000).parameters
    6738415616
    """
    width = queries or hidden
    attention = [(hidden, width), (hidden, key_values), (hidden, key_values), (width, hidden)]
    gate_and_up = [(hidden, 2 * feed_forward)] if experts else [(hidden, feed_forward)] * 2
    expert = [*gate_and_up, (feed_forward, hidden)]
    router = [(hidden, experts)] if experts else []
    weights = _size(attention + router) + max(experts, 1) * _size(expert)
    return ModelShape(
        name=name,
        layers=layers,
        hidden=hidden,
        block=weights + 2 * hidden,
        outside=((1 if tied else 2) * vocabulary + 1) * hidden,
        vocabulary=vocabulary,
        attention=width,
        linears=tuple(attention + router + expert * experts_per_token),
        elementwise=_elementwise(
            hidden, feed_forward * experts_per_token, (width + key_values) * norms_queries
        ),
    )


def _size(linears: Iterable[tuple[int, int]]) -> int:
    return sum(inputs * outputs for inputs, outputs in linears)


def _elementwise(hidden: int, gates: int, normed: int) -> int:
    """Elements, of two bytes, that transformers' Llama saves of a token beyond linear layers: the
    results of ``gates``, and float32 copies of what is normed. A test compares it with autograd.
    """
    return hidden + gates + 3 * normed


_llama2 = partial(decoder, vocabulary=32_000)
_llama3 = partial(decoder, vocabulary=128_256)
_qwen3 = partial(decoder, vocabulary=151_936, key_values=1024, norms_queries=True)
_KNOWN = (
    _llama2("llama2-7b", layers=32, hidden=4096, feed_forward=11008, key_values=4096),
    _llama2("llama2-13b", layers=40, hidden=5120, feed_forward=13824, key_values=5120),
    _llama2("llama2-70b", layers=80, hidden=8192, feed_forward=28672, key_values=1024),
    _llama3("llama3-1b", layers=16, hidden=2048, feed_forward=8192, key_values=512, tied=True),
    _llama3("llama3-8b", layers=32, hidden=4096, feed_forward=14336, key_values=1024),
    _llama3("llama3-70b", layers=80, hidden=8192, feed_forward=28672, key_values=1024),
    decoder(
        "mistral-7b",
        layers=32,
        hidden=4096,
        feed_forward=14336,
        key_values=1024,
        vocabulary=32_768,
    ),
    _qwen3("qwen3-4b", layers=36, hidden=2560, feed_forward=9728, queries=4096, tied=True),
    _qwen3("qwen3-8b", layers=36, hidden=4096, feed_forward=12288),
    _qwen3("qwen3-32b", layers=64, hidden=5120, feed_forward=25600, queries=8192),
    _qwen3(
        "qwen3-30b-a3b",
        layers=48,
        hidden=2048,
        feed_forward=768,
        queries=4096,
        key_values=512,
        experts=128,
        experts_per_token=8,
    ),
)
MODELS = {model.name: model for model in _KNOWN}
"""The models that ``bmt memory --model`` knows by name."""


def shape_of(text: str) -> tuple[ModelShape, bool]:
    """Return the shape of the model that ``--model`` names, and whether it is in a half type.

    That is a name in :data:`MODELS`, a ``config.json`` of transformers or its directory, or
    MODULE:FACTORY.
    """
    if text in MODELS:
        return MODELS[text], True
    if Path(text).exists():
        return shape_of_module(_model_of_transformers(text), text), True
    module, colon, factory = text.partition(":")
    if not (module and colon and factory):
        raise ConfigError(
            unknown_name("model", text, MODELS)
            + " Or give a directory with a config.json, or MODULE:FACTORY."
        )
    model = _model_of_factory(module, factory)
    return shape_of_module(model, text), next(model.parameters()).itemsize == 2


def _model_of_transformers(path: str) -> nn.Module:
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise ConfigError(
            f"{path} is a configuration of transformers, which is not installed. Install it with:"
            " pip install transformers"
        ) from error
    import torch

    try:
        config = AutoConfig.from_pretrained(path)
        with torch.device("meta"):
            model: nn.Module = AutoModelForCausalLM.from_config(config)
    except (OSError, ValueError) as error:
        first = str(error).strip().partition("\n")[0]
        raise ConfigError(f"transformers makes no language model of {path}: {first}") from error
    return model


def _model_of_factory(module: str, factory: str) -> nn.Module:
    import torch

    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        make = getattr(importlib.import_module(module), factory)
        with torch.device("meta"):
            model = make()
    except Exception as error:  # a user's code can raise anything
        raise ConfigError(
            f"{module}:{factory} makes no model on the meta device: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(f"{module}:{factory} returned {model!r}, which is no torch.nn.Module.")
    return model


def shape_of_module(model: nn.Module, name: str) -> ModelShape:
    """Return the shape of a model of plain torch. Its layers are the members of its lists, which
    ``BMTrainModelWrapper`` makes Blocks; a matrix in a layer is one linear layer, and a
    three-dimensional parameter is one linear layer per expert.
    """
    try:
        from bmt_zero.model_layers import layers_of
    except ImportError as error:
        raise ConfigError(
            f"The layers of a model are found by bmt-zero: {PACKAGES['bmt-zero'].install}"
        ) from error
    layers = layers_of(model)
    if not layers:
        raise ConfigError(f"{name} has no layers: hold them in a torch.nn.ModuleList.")
    sizes = [_number_of_elements(layer.parameters()) for layer in layers]
    largest = list(layers[sizes.index(max(sizes))].parameters())
    inside = {id(parameter) for layer in layers for parameter in layer.parameters()}
    outside = [each for each in model.parameters() if id(each) not in inside]
    config: Any = getattr(model, "config", None)
    used = getattr(config, "num_experts_per_tok", 1)
    linears = tuple(
        (each.shape[-1], each.shape[-2])
        for each in largest
        if each.dim() in (2, 3)
        for _ in range(used if each.dim() == 3 else 1)
    )
    if not linears:
        raise ConfigError(f"The layers of {name} have no matrices, so that nothing is known.")
    vectors = [each.numel() for each in largest if each.dim() == 1]
    hidden = getattr(config, "hidden_size", None) or (vectors or [linears[-1][1]])[-1]
    features = getattr(config, "head_dim", None) or 0
    attention = getattr(config, "num_attention_heads", 0) * features or hidden
    has_normed_heads = features in vectors
    key_values = getattr(config, "num_key_value_heads", 0) * features
    gates = _gates(linears, hidden)
    return ModelShape(
        name=name,
        layers=len(layers),
        hidden=hidden,
        block=-(-sum(sizes) // len(layers)),
        outside=_number_of_elements(outside),
        vocabulary=getattr(config, "vocab_size", None)
        or max((each.shape[0] for each in outside if each.dim() == 2), default=0),
        attention=attention,
        linears=linears,
        elementwise=_elementwise(hidden, gates, (attention + key_values) * has_normed_heads)
        if gates
        else 0,
    )


def _gates(linears: Iterable[tuple[int, int]], hidden: int) -> int:
    """Features of gated feed-forwards: two outputs of one width, or a double one, make an input."""
    into = Counter(outputs for _, outputs in linears)
    return sum(
        width
        for width, _ in linears
        if width != hidden and (into[width] >= 2 or into[2 * width] >= 1)
    )


def _number_of_elements(parameters: Iterable[nn.Parameter]) -> int:
    return sum(each.numel() for each in parameters)
