"""``attn_implementation="bmt_cp"``: models of Hugging Face train on divided sequences as on one
process, with their own attention.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
from context_hugging_face import CONFIGS, SHAPE, Divided, batch, model_of
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    BertConfig,
    Llama4TextConfig,
    MixtralConfig,
    NemotronConfig,
    Qwen2MoeConfig,
    RobertaConfig,
    StableLmConfig,
)

import bmt_cp
from bmt_core.errors import ConfigError
from bmt_cp.hugging_face import attention_of_model
from bmt_testing import TrainingSettings, assert_matches_single, on_ranks
from bmt_testing.programs import run_program
from bmt_zero import BMTrainModelWrapper


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("packed", [False, True])
def test_in_one_process_loss_and_gradients_are_those_of_the_model_itself(
    kind: str, packed: bool
) -> None:
    torch.manual_seed(0)
    own, ours = model_of(kind, "eager"), model_of(kind, "bmt_cp")
    ours.load_state_dict(own.state_dict())
    ids, labels, *documents = batch(packed, 0)
    part = bmt_cp.split(input_ids=ids, labels=labels, document_ids=documents[0] if packed else None)
    assert part.count is not None
    ours(**part).loss.backward()
    # Transformers finds documents by the positions of one row, where it has no cache.
    for row in range(len(ids)):
        rows = slice(row, row + 1)
        loss = own(
            input_ids=ids[rows],
            labels=labels[rows],
            position_ids=part["position_ids"][rows],
            use_cache=False,
        ).loss
        (loss * (labels[rows, 1:] != -100).sum()).backward()
    for (name, one), other in zip(own.named_parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("packed", [False, True])
def test_on_ranks_a_training_is_that_of_one_process(kind: str, packed: bool) -> None:
    settings = TrainingSettings(
        ranks=4 if packed else 2,
        axes={"cp": 2},
        gradients="sum",
        levels=(3, 1),
        recompute=(True, False),
    )
    assert_matches_single(partial(Divided, kind), partial(batch, packed), settings=settings)


@pytest.mark.parametrize("before", [True, False])
def test_transformers_knows_the_attention_whenever_it_is_imported(
    before: bool, tmp_path: Path
) -> None:
    lines = ["import bmt_cp", "from transformers import modeling_utils"]
    imports = "\n".join(lines[::-1] if before else lines)
    is_known = "assert 'bmt_cp' in modeling_utils.AttentionInterface()"
    status, output = run_program(f"{imports}\n{is_known}", tmp_path / "out")
    assert status == 0, output


SMALL: dict[str, Any] = {**SHAPE, "num_key_value_heads": 2}
WINDOW = Qwen2MoeConfig(
    **SMALL, use_sliding_window=True, sliding_window=5, max_window_layers=1, num_experts=2,
    moe_intermediate_size=16, shared_expert_intermediate_size=16, num_experts_per_tok=1,
)  # fmt: skip
CHUNKS = Llama4TextConfig(
    **SMALL, attention_chunk_size=6, intermediate_size_mlp=48, num_local_experts=2
)


@pytest.mark.parametrize(
    ("config", "message"),
    [(WINDOW, "has sliding_window=5, and its attention"), (CHUNKS, "a mask by chunked_overlay")],
)
def test_a_mask_that_is_not_computed_is_an_error(config: Any, message: str) -> None:
    model = AutoModelForCausalLM.from_config(config, attn_implementation="bmt_cp")
    ids, labels = batch(False, 0)
    with pytest.raises(ConfigError, match=message):
        model(**bmt_cp.split(input_ids=ids, labels=labels))


@on_ranks(2, init={"cp_size": 2})
@pytest.mark.parametrize(
    ("config", "packed", "message"),
    [
        (StableLmConfig(**SMALL), False, "StableLmForCausalLM has own attention"),
        (NemotronConfig(**SMALL), True, "document_ids, which no attention of the model gets"),
        (MixtralConfig(**SMALL, output_router_logits=True), False, "a loss of its routers"),
        (BertConfig(**SHAPE), False, "The model computes the mean loss"),
    ],
)
def test_a_model_that_loses_something_is_an_error(config: Any, packed: bool, message: str) -> None:
    kind = AutoModelForMaskedLM if isinstance(config, BertConfig) else AutoModelForCausalLM
    model = BMTrainModelWrapper(kind.from_config(config, attn_implementation="bmt_cp"))
    ids, labels, *documents = batch(packed, 0)
    part = bmt_cp.split(input_ids=ids, labels=labels, document_ids=documents[0] if packed else None)
    with pytest.raises(ConfigError, match=message):
        model(**part)


@on_ranks(2, init={"cp_size": 2})
def test_a_part_without_its_positions_is_an_error() -> None:
    model = BMTrainModelWrapper(model_of("qwen3", "bmt_cp"))
    ids, _ = batch(False, 0)
    with pytest.raises(ConfigError, match="Call the model with all of"):
        model(input_ids=bmt_cp.split(input_ids=ids)["input_ids"])


@on_ranks(2, init={"cp_size": 2})
def test_a_class_of_a_sequence_is_an_error() -> None:
    kind = AutoModelForSequenceClassification
    model = kind.from_config(CONFIGS["llama"], attn_implementation="bmt_cp")
    with pytest.raises(ConfigError, match="LlamaForSequenceClassification has logits of one token"):
        BMTrainModelWrapper(model)(**bmt_cp.split(input_ids=torch.arange(1, 17)[None]))


@on_ranks(2, init={"cp_size": 2})
def test_positions_that_begin_after_padding_are_asked_for() -> None:
    models = []
    for attention in ("eager", "bmt_cp"):
        config = RobertaConfig(**SHAPE, is_decoder=True, pad_token_id=1)
        torch.manual_seed(0)
        models += [AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()]
    whole, model = models[0], BMTrainModelWrapper(models[1])
    ids = torch.arange(2, 24)[None]
    with pytest.raises(ConfigError, match="counts positions from 2, and those of"):
        model(**bmt_cp.split(input_ids=ids))
    part = bmt_cp.split(input_ids=ids, position_ids=torch.arange(2, 24)[None])
    found = bmt_cp.gather(model(**part).logits)[:, :22]
    torch.testing.assert_close(found, whole(ids).logits)


@on_ranks(2, init={"cp_size": 2})
def test_an_evaluation_of_a_batch_that_was_not_divided_is_an_error() -> None:
    model = BMTrainModelWrapper(model_of("qwen3", "bmt_cp"))
    ids, labels = batch(False, 0)
    part = bmt_cp.split(input_ids=ids, labels=labels)
    model(**part).loss.backward()
    model.eval()
    with torch.no_grad():
        model(**part)
        with pytest.raises(ConfigError, match="Call the model with all of"):
            model(input_ids=ids[:, :20], labels=labels[:, :20])
        with pytest.raises(ConfigError, match="Call the model with all of"):
            model.generate(ids[:, :20], max_new_tokens=1)


def test_attention_to_a_cache_is_an_error() -> None:
    model = model_of("qwen3", "bmt_cp")
    with pytest.raises(ConfigError, match="other tokens, such as those of a cache"):
        model.generate(torch.ones(1, 8, dtype=torch.int64), max_new_tokens=2)


def test_layers_of_one_kind_are_compiled_once() -> None:
    torch._dynamo.reset()
    layers = [layer.self_attn for layer in model_of("qwen3", "bmt_cp").model.layers]
    compiled = torch.compile(attention_of_model, backend="eager")
    query = torch.rand(1, 2, 8, 4)
    for layer in layers:
        attention_of_model(layer, query, query, query, None)  # a first call is not compiled
    compiled(layers[0], query, query, query, None)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for layer in layers[1:]:
            compiled(layer, query, query, query, None)
