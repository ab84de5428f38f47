"""Plans for Hugging Face's GPT-2, Llama and Qwen models, chosen by the class of the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from torch import nn

from bmt_core.errors import ConfigError
from bmt_tp.plans.plan import Plan
from bmt_tp.plans.styles import Column, Head, Row, Style, VocabularyEmbedding, Whole

Value = TypeVar("Value")


def plan_for(
    model: nn.Module, *, gather_logits: bool = True, split_vocabulary: bool = True
) -> Plan:
    """Return the plan for a model of Hugging Face's GPT-2, Llama, Qwen2 or Qwen3 classes, with
    any head.

    With ``gather_logits`` every rank gets the logits of the whole vocabulary, so that the model's
    own loss works. Otherwise it gets those of its part of the vocabulary, for
    ``FusedCrossEntropy(parallel=True)``. With ``split_vocabulary=False`` every rank holds the whole
    embedding and head; use it if tp does not divide the vocabulary.

    Raises :class:`ConfigError` for any other class.
    """
    if callable(getattr(type(model), "get_base_model", None)):
        raise ConfigError(
            f"{type(model).__name__} is PEFT's model around another one, and plans name the modules"
            " of that one. Call parallelize(model.get_base_model()), which changes it in place, and"
            " go on with the model around it."
        )
    base = getattr(model, "base_model", model)
    names = [kind.__name__ for kind in type(base).__mro__]
    known = [make for name, make in _PLANS.items() if name in names]
    if not known:
        raise ConfigError(
            f"There is no plan for {type(model).__name__}; there are plans for {', '.join(_PLANS)}."
            " Pass one: parallelize(model, Plan(parameters={'embed': VocabularyEmbedding(),"
            " 'layers.*.up': Column(gather='sequence_first'), 'layers.*.down':"
            " Row(input='sequence_first')}, layers='layers.*', last='norm'))."
            " docs/tensor-parallel.md says how."
        )
    prefix = next(
        f"{name}." if name else "" for name, module in model.named_modules() if module is base
    )
    plan = known[0](base, prefix, VocabularyEmbedding() if split_vocabulary else Whole())
    head = Head(gather_output=gather_logits) if split_vocabulary else Whole()
    outside = {
        name: head if name == "lm_head" else Whole()
        for name, child in model.named_children()
        if not prefix.startswith(f"{name}.")
        and model is not base
        and any(True for _ in child.parameters())
    }
    return Plan(
        parameters={**plan.parameters, **outside},
        layers=plan.layers,
        last=plan.last,
        gathered=plan.gathered,
        divided=plan.divided,
    )


def generates(module: nn.Module) -> bool:
    """Whether ``module`` has the method ``generate`` of Hugging Face's models, or its own
    around that.
    """
    return any(kind.__name__ == "GenerationMixin" for kind in type(module).__mro__)


def _gpt2(base: Any, prefix: str, embedding: Style) -> Plan:
    if base.config.add_cross_attention:
        raise ConfigError(
            "The plan for GPT-2 has no cross-attention, but the model's config has"
            " add_cross_attention=True. Set it to False, or pass a plan of your own."
        )
    queries_keys_values = Column(
        heads="num_attention_heads", sections=(1, 1, 1), gather="batch_first"
    )
    parameters: dict[str, Style] = {
        "wte": embedding,
        "wpe": Whole(),
        "h.*.attn.c_attn": queries_keys_values,
        "h.*.attn.c_proj": Row(input="batch_first"),
        "h.*.mlp.c_fc": Column(gather="sequence_first"),
        "h.*.mlp.c_proj": Row(input="sequence_first"),
    }
    return Plan(
        parameters=_under(prefix, parameters),
        layers=f"{prefix}h.*",
        last=f"{prefix}ln_f",
        divided=_under(prefix, {"h.*.attn": ("num_heads", "split_size")}),
    )


def _llama(base: Any, prefix: str, embedding: Style) -> Plan:
    parameters: dict[str, Style] = {
        "embed_tokens": embedding,
        "layers.*.self_attn.q_proj": Column(heads="num_attention_heads"),
        "layers.*.self_attn.[kv]_proj": Column(heads="num_key_value_heads"),
        "layers.*.self_attn.o_proj": Row(input="batch_first"),
        "layers.*.mlp.gate_proj": Column(),
        "layers.*.mlp.up_proj": Column(),
        "layers.*.mlp.down_proj": Row(input="sequence_first"),
    }
    return Plan(
        parameters=_under(prefix, parameters),
        layers=f"{prefix}layers.*",
        last=f"{prefix}norm",
        gathered={
            f"{prefix}layers.*.self_attn": "batch_first",
            f"{prefix}layers.*.mlp": "sequence_first",
        },
    )


_PLANS: dict[str, Callable[[Any, str, Style], Plan]] = {
    "GPT2Model": _gpt2,
    "LlamaModel": _llama,
    "Qwen2Model": _llama,
    "Qwen3Model": _llama,
}


def _under(prefix: str, entries: Mapping[str, Value]) -> dict[str, Value]:
    return {prefix + pattern: value for pattern, value in entries.items()}
