"""The plans for Hugging Face's models: what they refuse, and what they say of other heads."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_models import MODELS, built, gpt2, llama
from transformers import GPT2ForSequenceClassification, LlamaModel

from bmt_core.errors import ConfigError
from bmt_tp import Head, Whole, plan_for
from bmt_tp.plans.matching import match


def test_heads_that_tp_does_not_divide_are_refused_with_the_numbers() -> None:
    model = llama()
    with pytest.raises(ConfigError) as caught:
        match(model, plan_for(model), 8)
    assert str(caught.value) == (
        "model.layers.0.self_attn.k_proj, a Linear with weight of shape (16, 32): tp_size=8 does"
        " not divide the number of heads (num_key_value_heads), 4. Choose another tp_size."
    )
    model = gpt2(vocab_size=48)
    with pytest.raises(
        ConfigError,
        match=r"c_attn, a Conv1D .* does not divide the number of heads \(num_attention_heads\), 4",
    ):
        match(model, plan_for(model), 8)


def test_a_vocabulary_that_tp_does_not_divide_can_stay_whole() -> None:
    model = gpt2(vocab_size=41)
    with pytest.raises(
        ConfigError,
        match=r"transformer.wte, an? .* 41. .*plan_for\(model, split_vocabulary=False\)",
    ):
        match(model, plan_for(model), 2)
    found = match(model, plan_for(model, split_vocabulary=False), 2)
    assert found.styles["lm_head"] == Whole() and found.styles["transformer.wte"] == Whole()


def test_logits_are_gathered_unless_asked() -> None:
    model = llama()
    assert plan_for(model).parameters["lm_head"] == Head(gather_output=True)
    assert plan_for(model, gather_logits=False).parameters["lm_head"] == Head(gather_output=False)


def test_other_heads_are_whole_and_a_model_may_have_none() -> None:
    classifier = GPT2ForSequenceClassification(gpt2().config)
    assert match(classifier, plan_for(classifier), 2).styles["score"] == Whole()
    headless = LlamaModel(llama().config)
    assert "layers.1.mlp.down_proj" in match(headless, plan_for(headless), 2).styles


def test_a_class_without_a_plan_is_refused_with_an_example() -> None:
    model = built("gpt2").transformer.h[0].mlp  # type: ignore[union-attr, index]
    with pytest.raises(
        ConfigError, match=r"There is no plan for GPT2MLP; .* Pass one: parallelize\(model, Plan\("
    ):
        plan_for(model)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="has no cross-attention"):
        plan_for(gpt2(add_cross_attention=True))


@st.composite
def sizes(draw: st.DrawFn) -> tuple[str, int, dict[str, int]]:
    """A model's name, tp_size, and a configuration that it divides."""
    tp_size = draw(st.sampled_from([2, 3, 4]))
    groups, times, layers = (
        draw(st.integers(1, 2)),
        draw(st.integers(1, 3)),
        draw(st.integers(1, 3)),
    )
    key_value_heads = tp_size * groups
    heads = key_value_heads * times
    options = {
        "vocab_size": tp_size * draw(st.integers(13, 16)),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
    }
    name = draw(st.sampled_from(["gpt2", "llama", "qwen2", "qwen3"]))
    if name == "gpt2":
        options = {
            "vocab_size": options["vocab_size"],
            "n_layer": layers,
            "n_head": heads,
            "n_embd": 2 * heads,
        }
    else:
        options |= {
            "num_key_value_heads": key_value_heads,
            "hidden_size": 2 * heads,
            "intermediate_size": 6 * tp_size,
        }
    return name, tp_size, options


@settings(max_examples=25)
@given(sizes())
def test_a_ready_plan_names_each_parameter_once_and_what_is_cut_is_joined_again(
    drawn_sizes: tuple[str, int, dict[str, int]],
) -> None:
    name, tp_size, options = drawn_sizes
    with torch.device("meta"):
        model = MODELS[name](**options)
    found = match(model, plan_for(model), tp_size)
    named, sized = set(found.claims), dict(model.named_parameters(remove_duplicate=False))
    rest = sized.keys() - named
    assert named <= sized.keys() and all("norm" in other or "ln_" in other for other in rest)
    for key, claim in found.claims.items():
        if claim.locality is None or claim.locality.split_dim is None:
            continue
        whole = torch.arange(sized[key].numel()).view(sized[key].shape)
        slices = [claim.locality.cut(whole, index, tp_size) for index in range(tp_size)]
        assert len({part.shape for part in slices}) == 1
        assert torch.equal(claim.locality.join(slices), whole), key
