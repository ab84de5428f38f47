"""Models of transformers that compute their loss without logits, beside the same models as they
are: losses, gradients, steps, outputs and memory, plain, sharded, split and by the Trainer.
"""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", minversion="5.23")

import torch
import torch._dynamo.testing
import transformers
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from trainer_runs import accelerate_forgets, bmt_trainer, model_of, padded, rows

import bmt_hf
import bmt_hf.linear_cross_entropy as module
from bmt_core.errors import ConfigError
from bmt_hf import use_linear_cross_entropy
from bmt_testing import TrainingSettings, assert_matches_single, run_ranks
from bmt_tp import parallelize, plan_for
from bmt_zero import BMTrainModelWrapper

SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
}


def of_config(name: str, **options: Any) -> Any:
    torch.manual_seed(1)
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **options})
    return getattr(transformers, f"{name}ForCausalLM")(config).double()


def llama(*, is_tied: bool = False) -> Any:
    return of_config("Llama", tie_word_embeddings=is_tied)


def llama_with_bias() -> Any:
    model = llama()
    model.lm_head = nn.Linear(16, 40).double()
    return model


WITHOUT_LOGITS: dict[str, Callable[[], Any]] = {
    "Llama": llama,
    "Llama, tied": functools.partial(llama, is_tied=True),
    "a head with a bias": llama_with_bias,
    "GPT-2": lambda: model_of("gpt2").double(),
    "experts with a loss of their own": functools.partial(
        of_config,
        "Qwen3Moe",
        moe_intermediate_size=8,
        num_experts=4,
        num_experts_per_tok=2,
        output_router_logits=True,
        experts_implementation="eager",
    ),
    "capped": functools.partial(of_config, "Gemma2", final_logit_softcapping=0.3),
    "scaled": functools.partial(of_config, "Cohere", logit_scale=0.3),
    "divided": functools.partial(of_config, "Granite", logits_scaling=3.0),
}


class MasksLogits(transformers.LlamaForCausalLM):  # type: ignore[misc]
    """Does to its logits what nobody has foreseen."""

    def forward(self, input_ids: torch.Tensor, labels: Any = None, **options: Any) -> Any:
        hidden = self.model(input_ids=input_ids).last_hidden_state
        logits = -self.lm_head(hidden)
        logits = torch.exp(logits) + 1.0
        logits[..., 3] = -1e4
        loss = self.loss_function(logits, labels, self.config.vocab_size, **options)
        return transformers.modeling_outputs.CausalLMOutput(loss=loss, logits=logits)


class CallsItsHeadTwice(transformers.LlamaForCausalLM):  # type: ignore[misc]
    """Has a second loss, of logits that it reads."""

    def forward(self, input_ids: torch.Tensor, labels: Any = None, **options: Any) -> Any:
        hidden = self.model(input_ids=input_ids).last_hidden_state
        logits, others = self.lm_head(hidden), self.lm_head(hidden.sin())
        loss = self.loss_function(logits, labels, self.config.vocab_size, **options)
        loss = loss + others.float().square().mean() + torch.tanh(torch.tanh(others)).sum()
        return transformers.modeling_outputs.CausalLMOutput(loss=loss, logits=others)


WITH_LOGITS: dict[str, Callable[[], Any]] = {
    "masked": lambda: _seeded(MasksLogits),
    "read": lambda: _seeded(CallsItsHeadTwice),
    "T5": lambda: _t5(),
}


def _seeded(kind: Any) -> Any:
    torch.manual_seed(1)
    return kind(transformers.LlamaConfig(**SIZES)).double()


def _t5() -> Any:
    torch.manual_seed(1)
    sizes = {"vocab_size": 40, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1}
    config = transformers.T5Config(**sizes, num_heads=2, dropout_rate=0.0, decoder_start_token_id=0)
    return transformers.T5ForConditionalGeneration(config).double()


def batch(count: int = 4) -> dict[str, torch.Tensor]:
    made = padded(rows(count))
    return {name: made[name] for name in ("input_ids", "labels")}


def gradients(model: Any, **inputs: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor], Any]:
    output = model(**inputs)
    output.loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return output.loss.detach(), grads, output.logits


INPUTS: dict[str, dict[str, Any]] = {
    "labels": {},
    "num_items_in_batch": {"num_items_in_batch": 17},
    "num_items_in_batch, a tensor": {"num_items_in_batch": torch.tensor(23)},
    "shift_labels": {"shift_labels": batch()["labels"].roll(-1, 1)},
}


@pytest.mark.parametrize("inputs", INPUTS.values(), ids=INPUTS)
@pytest.mark.parametrize("make", WITHOUT_LOGITS.values(), ids=WITHOUT_LOGITS)
def test_loss_and_gradients_are_the_models(make: Any, inputs: dict[str, Any]) -> None:
    loss, grads, logits = gradients(use_linear_cross_entropy(make()), **batch(), **inputs)
    # transformers computes the loss in float32, also of a model in float64
    expected_loss, expected, _ = gradients(make(), **batch(), **inputs)
    torch.testing.assert_close(loss, expected_loss.double(), rtol=1e-6, atol=0)
    assert logits is None
    for name, grad in expected.items():
        torch.testing.assert_close(grads[name], grad, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("make", WITH_LOGITS.values(), ids=WITH_LOGITS)
def test_models_that_read_their_logits_get_them(make: Any) -> None:
    loss, grads, logits = gradients(use_linear_cross_entropy(make()), **batch())
    expected_loss, expected, expected_logits = gradients(make(), **batch())
    torch.testing.assert_close(loss, expected_loss.to(loss.dtype), rtol=1e-6, atol=0)
    torch.testing.assert_close(logits, expected_logits)
    torch.testing.assert_close(grads, expected, rtol=1e-4, atol=1e-7)


def test_outputs_are_as_before_but_for_the_logits() -> None:
    model, plain = use_linear_cross_entropy(llama()), llama()
    inputs = batch()
    ids = inputs["input_ids"]
    torch.testing.assert_close(model(ids).logits, plain(ids).logits)
    assert torch.equal(model.generate(ids, max_new_tokens=3), plain.generate(ids, max_new_tokens=3))
    found = model(**inputs, output_hidden_states=True)
    expected = plain(**inputs, output_hidden_states=True)
    assert found.keys() == expected.keys() - {"logits"} and type(found) is type(expected)
    short, whole = (each(**inputs, return_dict=False, use_cache=False) for each in (model, plain))
    assert len(short) == len(whole) - 1
    torch.testing.assert_close(short[0].float(), whole[0].float())
    with module.logits_kept(model, True):
        torch.testing.assert_close(model(**inputs).logits, expected.logits)
    assert model(**inputs).logits is None
    assert inspect.signature(model.forward) == inspect.signature(plain.forward)
    assert model.loss_function is plain.loss_function and "forward" not in vars(model.lm_head)


def test_copies_and_pickles_compute_by_themselves() -> None:
    model = use_linear_cross_entropy(use_linear_cross_entropy(llama()))
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        other.lm_head.weight.data.zero_()
        assert other(**batch()).loss.item() == pytest.approx(torch.tensor(40.0).log().item())
    assert model(**batch()).loss.item() != pytest.approx(torch.tensor(40.0).log().item())


def test_a_head_that_is_watched_or_adapted_gives_logits() -> None:
    peft = pytest.importorskip("peft")
    seen = []
    model = use_linear_cross_entropy(llama())
    hook = model.lm_head.register_forward_hook(lambda *args: seen.append(args[2].shape))
    assert model(**batch()).logits is not None and seen == [(4, 12, 40)]
    hook.remove()
    config = peft.LoraConfig(target_modules=["q_proj", "lm_head"], init_lora_weights=False)
    torch.manual_seed(3)
    adapted = peft.get_peft_model(llama(), config)
    plain = copy.deepcopy(adapted)
    with pytest.raises(ConfigError, match=r"is no nn\.Linear"):
        use_linear_cross_entropy(adapted)
    config = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(llama(), config)
    plain = copy.deepcopy(adapted)
    loss, grads, logits = gradients(use_linear_cross_entropy(adapted), **batch())
    expected_loss, expected, _ = gradients(plain, **batch())
    assert logits is None and grads.keys() == expected.keys()
    torch.testing.assert_close(loss, expected_loss.double(), rtol=1e-6, atol=0)
    torch.testing.assert_close(grads, expected, rtol=1e-4, atol=1e-7)


def test_other_losses_and_heads_are_refused() -> None:
    classifier = transformers.LlamaForSequenceClassification(transformers.LlamaConfig(**SIZES))
    with pytest.raises(ConfigError, match="not transformers' ForCausalLMLoss"):
        use_linear_cross_entropy(classifier)
    with pytest.raises(ConfigError, match="Linear cannot compute its loss without logits"):
        use_linear_cross_entropy(nn.Linear(2, 2))
    model = llama()
    model.loss_function = lambda logits, labels, vocab_size, **options: logits.sum()
    with pytest.raises(ConfigError, match="ForCausalLMLoss"):
        use_linear_cross_entropy(model)


class Largest(TorchDispatchMode):
    """The largest number of elements of a tensor that an operation has made."""

    def __init__(self) -> None:
        super().__init__()
        self.found = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, (tuple, list)) else (made,):
            if isinstance(tensor, torch.Tensor):
                self.found = max(self.found, tensor.numel())
        return made


def test_the_logits_never_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bmt_params.losses.linear_cross_entropy.CHUNK_BYTES", 2**14)
    ids = torch.randint(1, 512, (8, 64))
    sizes = {"vocab_size": 512, "tie_word_embeddings": True}
    for dtype in (torch.bfloat16, torch.float32):
        found = []
        for change in (use_linear_cross_entropy, lambda model: model):
            model = change(of_config("Llama", **sizes).to(dtype))
            with Largest() as largest:
                model(input_ids=ids, labels=ids).loss.backward()
            found.append(largest.found)
        assert found[0] * 8 <= found[1] == 8 * 64 * 512


def test_a_compiled_model_computes_the_same_without_compiling_again() -> None:
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    model = use_linear_cross_entropy(llama())
    compiled = torch.compile(model, backend=counter)
    expected, grads, _ = gradients(llama(), **batch())
    counts = []
    for _ in range(3):
        model.zero_grad()
        loss, found, logits = gradients(compiled, **batch())
        counts.append(counter.frame_count)
        torch.testing.assert_close(loss, expected.double(), rtol=1e-6, atol=0)
        assert logits is None
        renamed = {name.removeprefix("_orig_mod."): grad for name, grad in found.items()}
        torch.testing.assert_close(renamed, grads, rtol=1e-4, atol=1e-7)
    assert counts[0] > 0 and counts[1] == counts[2]


def counted(output: Any, inputs: Any) -> Any:
    """The sum of the losses and their number, of a loss that is a mean."""
    count = (inputs["labels"][:, 1:] != -100).sum()
    return output.loss * count, count


def llama_tied() -> Any:
    return llama(is_tied=True)


def tokens(seed: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(1, 40, (4, 6))
    return {"input_ids": ids, "labels": ids.masked_fill(ids % 4 == 0, -100)}


def split(model: Any) -> Any:
    return use_linear_cross_entropy(parallelize(model))


def split_without_gathering(model: Any) -> Any:
    plan = plan_for(model, gather_logits=False)
    return parallelize(use_linear_cross_entropy(model), plan)


# float32: the loss of transformers is float32 also in float64
SETTINGS = {"dtype": "float32", "gradients": "sum", "levels": (3,)}


@pytest.mark.parametrize(
    ("model_fn", "drawn"),
    [
        (llama, TrainingSettings(ranks=2, **{**SETTINGS, "levels": (0,)}, micro_batches=2)),
        (llama_tied, TrainingSettings(ranks=4, **SETTINGS, recompute=(True,))),
        (
            llama,
            TrainingSettings(
                ranks=2, **{**SETTINGS, "levels": (2,)}, micro_batches=2, no_sync=True
            ),
        ),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_sharded_model_trains_as_the_plain_one(drawn: TrainingSettings, model_fn: Any) -> None:
    assert_matches_single(
        model_fn,
        tokens,
        settings=drawn,
        loss_fn=counted,
        parallelize=use_linear_cross_entropy,
    )


@pytest.mark.parametrize(
    ("model_fn", "change"), [(llama, split_without_gathering), (llama_tied, split)]
)
def test_a_model_whose_head_is_split_trains_as_the_plain_one(model_fn: Any, change: Any) -> None:
    drawn = TrainingSettings(ranks=2, axes={"tp": 2}, **SETTINGS)
    assert_matches_single(model_fn, tokens, settings=drawn, loss_fn=counted, parallelize=change)


def test_a_split_head_computes_no_logits_of_its_own() -> None:
    expected = llama()(**batch()).loss.item()
    for found in run_ranks(of_split_heads, 2, init={"tp_size": 2}):
        for (loss, has_logits, shape), classes in zip(found, (40, 20), strict=True):
            assert loss == pytest.approx(expected, rel=1e-6)
            assert not has_logits and shape == (4, 12, classes)


def of_split_heads() -> list[Any]:
    found = []
    for change in (split, split_without_gathering):
        model: Any = BMTrainModelWrapper(change(llama()))
        output = model(**batch())
        shape = model(batch()["input_ids"]).logits.shape
        found.append((output.loss.item(), output.logits is not None, tuple(shape)))
    return found


def head_calls(trainer: Any) -> list[bool]:
    """What is appended to for each call of the model: whether it has returned logits."""
    found: list[bool] = []
    base = trainer.model
    base.register_forward_hook(lambda *args: found.append(args[2].get("logits") is not None))
    return found


def test_the_trainer_needs_logits_only_for_metrics_and_predictions(tmp_path: Path) -> None:
    assert run_ranks(logits_of_trainer, 1, str(tmp_path), init=None) == [True]


def logits_of_trainer(folder: str) -> bool:
    with accelerate_forgets():
        trainer = bmt_trainer(folder, {"max_steps": 2, "model": llama_float32})
        found = head_calls(trainer)
        trainer.train()
        assert found and not any(found)
        found.clear()
        metrics = trainer.evaluate()  # with accuracy
        assert all(found) and "eval_accuracy" in metrics
        found.clear()
        trainer.compute_metrics = None
        # In chunks and from whole logits the sums are rounded otherwise: two roundings of float32.
        assert trainer.evaluate()["eval_loss"] == pytest.approx(metrics["eval_loss"], rel=2.4e-7)
        assert not any(found)
        assert trainer.predict(rows(4)).predictions.shape == (4, 12, 40)
        own = type("Own", (bmt_hf.Trainer,), {"compute_loss": compute_loss_of_logits})
        other = own(
            model=llama_float32(), args=trainer.args, train_dataset=rows(8), data_collator=padded
        )
        found = head_calls(other)
        other.train()
        assert all(found)
    return True


def llama_float32() -> Any:
    return llama().float()


def compute_loss_of_logits(self: Any, model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
    return model(**inputs).logits.square().mean()
