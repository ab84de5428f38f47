"""A family of models as libraries on BMTrain write them: an encoder-decoder of their own layers,
with ``import bmtrain as bmt``.

:func:`in_plain_torch` gives the same module where ``bmt`` is nothing but torch.
"""

from __future__ import annotations

import importlib.util
import math
import sys
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F

import bmtrain as bmt

Cache = list[tuple[torch.Tensor, torch.Tensor]]


def rms_norm(hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    variance = hidden.to(torch.float32).pow(2).mean(dim=-1, keepdim=True)
    return (hidden * torch.rsqrt(variance + eps)).to(hidden.dtype) * weight


scripted_rms_norm = torch.jit.script(rms_norm)


class Norm(bmt.DistributedModule):
    def __init__(self, width: int, scripted: bool) -> None:
        super().__init__()
        self.norm = scripted_rms_norm if scripted else rms_norm
        self.weight = bmt.DistributedParameter(torch.full((width,), 1.0))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.norm(hidden, self.weight, 1e-6)


class Linear(bmt.DistributedModule):
    def __init__(self, width_in: int, width_out: int, bias: bool = False) -> None:
        super().__init__()
        init = bmt.ParameterInitializer(
            torch.nn.init.normal_, mean=0.0, std=1 / math.sqrt(width_in)
        )
        self.weight = bmt.DistributedParameter(torch.empty(width_out, width_in), init_method=init)
        zeros = bmt.ParameterInitializer(torch.nn.init.zeros_)
        self.bias = (
            bmt.DistributedParameter(torch.empty(width_out), init_method=zeros) if bias else None
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


class Embedding(bmt.DistributedModule):
    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        init = bmt.ParameterInitializer(torch.nn.init.normal_, std=0.5)
        self.weight = bmt.DistributedParameter(torch.empty(words, width), init_method=init)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids, self.weight)

    def projection(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.linear(hidden, self.weight)


class RelativePositionBias(bmt.DistributedModule):
    """One number for each head and distance. It is computed once, and every block adds it to
    its scores.
    """

    def __init__(self, heads: int, longest: int, bidirectional: bool) -> None:
        super().__init__()
        self.longest, self.bidirectional = longest, bidirectional
        init = bmt.ParameterInitializer(torch.nn.init.normal_, std=0.3)
        self.weight = bmt.DistributedParameter(
            torch.empty(2 * longest + 1, heads), init_method=init
        )

    def forward(self, queries: int, keys: int) -> torch.Tensor:
        device = self.weight.device
        distance = (
            torch.arange(keys, device=device)[None]
            - torch.arange(keys - queries, keys, device=device)[:, None]
        )
        bias = F.embedding(
            distance.clamp(-self.longest, self.longest) + self.longest, self.weight
        ).permute(2, 0, 1)
        return bias if self.bidirectional else bias.masked_fill(distance > 0, -1e9)


class Attention(bmt.DistributedModule):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.project_q, self.project_k, self.project_v, self.out = (
            Linear(width, width) for _ in range(4)
        )

    def forward(
        self,
        query: torch.Tensor,
        source: torch.Tensor,
        mask: torch.Tensor | None,
        position_bias: torch.Tensor | None = None,
        past: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> Any:
        q, k, v = (
            project(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for project, x in (
                (self.project_q, query),
                (self.project_k, source),
                (self.project_v, source),
            )
        )
        if past is not None:
            k, v = torch.cat([past[0], k], dim=2), torch.cat([past[1], v], dim=2)
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        if position_bias is not None:
            scores = scores + position_bias
        if mask is not None:
            scores = scores.masked_fill(~mask[:, None, None], -1e9)
        read = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        return self.out(read), (k, v)


class FeedForward(bmt.DistributedModule):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate, self.up, self.down = (
            Linear(width, inner),
            Linear(width, inner, bias=True),
            Linear(inner, width),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class TransformerBlock(bmt.DistributedModule):
    """Self-attention, cross-attention if ``is_decoder``, and the feed-forward network."""

    def __init__(self, width: int, heads: int, is_decoder: bool, scripted: bool) -> None:
        super().__init__()
        self.attention, self.norm = Attention(width, heads), Norm(width, scripted)
        self.cross, self.cross_norm = None, None
        if is_decoder:
            self.cross, self.cross_norm = Attention(width, heads), Norm(width, scripted)
        self.ffn, self.ffn_norm = FeedForward(width, 3 * width), Norm(width, scripted)

    def forward(
        self,
        hidden: torch.Tensor,
        mask: torch.Tensor | None,
        position_bias: torch.Tensor | None = None,
        encoded: torch.Tensor | None = None,
        encoded_mask: torch.Tensor | None = None,
        cross_bias: torch.Tensor | None = None,
        use_cache: bool = False,
        past_key_value: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> Any:
        x = self.norm(hidden)
        read, present = self.attention(x, x, mask, position_bias, past_key_value)
        hidden = hidden + read
        if self.cross is not None:
            hidden = (
                hidden + self.cross(self.cross_norm(hidden), encoded, encoded_mask, cross_bias)[0]
            )
        hidden = hidden + self.ffn(self.ffn_norm(hidden))
        return (hidden, present) if use_cache else hidden


class Stack(bmt.DistributedModule):
    def __init__(
        self, layers: int, width: int, heads: int, is_decoder: bool, scripted: bool, **block: Any
    ) -> None:
        super().__init__()
        self.position_bias = RelativePositionBias(heads, 3, bidirectional=not is_decoder)
        blocks = [
            bmt.CheckpointBlock(TransformerBlock(width, heads, is_decoder, scripted), **block)
            for _ in range(layers)
        ]
        self.layers = bmt.TransformerBlockList(blocks)
        self.norm = Norm(width, scripted)

    def forward(
        self, hidden: torch.Tensor, mask: torch.Tensor | None, *encoded: torch.Tensor | None
    ) -> torch.Tensor:
        bias = self.position_bias(hidden.shape[1], hidden.shape[1])
        return self.norm(self.layers(hidden, mask, bias, *encoded))

    def with_cache(
        self, hidden: torch.Tensor, past: Cache | None, *encoded: Any
    ) -> tuple[torch.Tensor, Cache]:
        known = 0 if past is None else past[0][0].shape[2]
        bias = self.position_bias(hidden.shape[1], known + hidden.shape[1])
        present: Cache = []
        for index, layer in enumerate(self.layers):
            kept = None if past is None else past[index]
            hidden, new = layer(
                hidden, None, bias, *encoded, None, use_cache=True, past_key_value=kept
            )
            present.append(new)
        return self.norm(hidden), present


class EncoderDecoder(bmt.DistributedModule):
    """``scripted``: the norms are functions of TorchScript. ``block``: options of each Block."""

    FORMAT = 3

    def __init__(
        self,
        words: int,
        width: int = 8,
        heads: int = 2,
        layers: int = 2,
        scripted: bool = False,
        **block: Any,
    ) -> None:
        super().__init__()
        self.embedding = Embedding(words, width)
        self.encoder = Stack(layers, width, heads, False, scripted, **block)
        self.decoder = Stack(layers, width, heads, True, scripted, **block)

    def forward(
        self, ids: torch.Tensor, mask: torch.Tensor, decoder_ids: torch.Tensor
    ) -> torch.Tensor:
        encoded = self.encoder(self.embedding(ids), mask, None, None, None)
        hidden = self.decoder(self.embedding(decoder_ids), None, encoded, mask, None)
        return self.embedding.projection(hidden)

    @torch.no_grad()
    def generate(self, ids: torch.Tensor, mask: torch.Tensor, length: int) -> torch.Tensor:
        """Return the logits of ``length`` words, each the likeliest after those before it, (batch,
        length, words).
        """
        encoded = self.encoder(self.embedding(ids), mask, None, None, None)
        last, past, logits = ids[:, :1], None, []
        for _ in range(length):
            hidden, past = self.decoder.with_cache(self.embedding(last), past, encoded, mask)
            logits.append(self.embedding.projection(hidden))
            last = logits[-1].argmax(-1)
        return torch.cat(logits, dim=1)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """With the number of the format, as libraries add it."""
        state = super().state_dict(*args, **kwargs)
        state["format"] = torch.tensor(self.FORMAT)
        return state

    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        state = dict(state_dict)
        if int(state.pop("format")) != self.FORMAT:
            raise ValueError("another format")
        return super().load_state_dict(state, *args, **kwargs)


def in_plain_torch() -> ModuleType:
    """Return this module, of which every layer is an ``nn.Module`` with ``nn.Parameter``s, and no
    Block is a Block.
    """
    spec = importlib.util.spec_from_file_location(f"{__name__}_in_plain_torch", __file__)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with mock.patch.dict(sys.modules, {"bmtrain": _PlainTorch}):
        spec.loader.exec_module(module)
    return module


def _parameter(data: torch.Tensor, init_method: Any = None) -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(data)
    parameter.init_method = init_method  # type: ignore[attr-defined]
    return parameter


@torch.no_grad()
def _init_parameters(model: torch.nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.init_method is not None:  # type: ignore[attr-defined]
            parameter.init_method(parameter)  # type: ignore[attr-defined]


class _List(torch.nn.ModuleList):
    def forward(self, hidden: torch.Tensor, *args: Any) -> torch.Tensor:
        for layer in self:
            hidden = layer(hidden, *args)
        return hidden


class _Initializer:
    def __init__(self, function: Any, *args: Any, **kwargs: Any) -> None:
        self.call = function, args, kwargs

    def __call__(self, tensor: torch.Tensor) -> None:
        function, args, kwargs = self.call
        function(tensor, *args, **kwargs)


_PlainTorch: Any = SimpleNamespace(
    DistributedModule=torch.nn.Module,
    DistributedParameter=_parameter,
    ParameterInitializer=_Initializer,
    CheckpointBlock=lambda module, **options: module,
    TransformerBlockList=_List,
    init_parameters=_init_parameters,
)
