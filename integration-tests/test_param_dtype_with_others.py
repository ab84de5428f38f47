"""``param_dtype`` with what other packages bring: axes of the grid, optimizers, compiled and float8
layers, models of Hugging Face, PEFT's adapters and the Trainer.
"""

from __future__ import annotations

from contextlib import redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from chain_models import Chain, batch, split
from dtype_models import HALF, assert_equal, cast_arguments, train_plainly, train_sharded
from offload_training import Offload
from torch import nn

import bmtrain as bmt
from bmt_core.run.runtime import rank, world_size
from bmt_testing import TrainingSettings, assert_matches_single, on_ranks
from bmt_zero import Block, BMTrainModelWrapper

DTYPES: list[Any] = [("float64", "float32"), ("float32", "bfloat16")]


def offload(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return Offload(parameters, lr=0.02, eps=1e-3)


def torchs_adam(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.02, eps=1e-3)


@pytest.mark.parametrize(("dtype", "param_dtype"), DTYPES)
@pytest.mark.parametrize("axis", ["tp", "pp"])
def test_training_on_other_axes_equals_plain_torch(axis: str, dtype: Any, param_dtype: Any) -> None:
    settings = TrainingSettings(
        ranks=4,
        axes={axis: 2},
        dtype=dtype,
        param_dtype=param_dtype,
        levels=(3, 0, 2, 1),
        recompute=(True, False),
        micro_batches=2,
        gradients="sum",
        max_norm=0.1,
        optimizer="adam",
        reload=True,
    )
    assert_matches_single(
        Chain,
        batch,
        settings=settings,
        reference="parts",
        parallelize=split if axis == "tp" else None,
        pipeline="layers" if axis == "pp" else None,
    )


def optimized(make: Any, param_dtype: torch.dtype | None, steps: int = 3) -> dict[str, Any]:
    """Train with the optimizer that ``make`` returns; return losses and parameters."""
    torch.manual_seed(0)
    model = BMTrainModelWrapper(Chain(), param_dtype=param_dtype)
    manager = bmt.optim.OptimManager()
    manager.add_optimizer(make(list(model.parameters())))
    found: dict[str, Any] = {}
    for step in range(steps):
        manager.zero_grad()
        loss = model(batch(step).chunk(world_size())[rank()])
        manager.backward(loss)
        found[f"norm {step}"] = manager.clip_grad_norm(model.parameters(), 0.1)
        manager.step()
        found[f"loss {step}"] = loss.detach()
    values = bmt.inspect.inspect_model(model, "layers.0.up.weight")
    whole = {name: p.gather_all().detach() for name, p in model.named_parameters()}  # type: ignore[attr-defined]
    for value in values:
        assert abs(value["mean"] - float(whole["layers.0.up.weight"].mean())) < 1e-6
    return found | whole


@on_ranks(2)
def test_offloaded_and_overlapped_updates_are_those_of_torchs_adam() -> None:
    expected = optimized(torchs_adam, HALF)
    adam = partial(bmt.optim.AdamOptimizer, lr=0.02, eps=1e-3)
    for make in (offload, adam, partial(adam, overlap_forward=True)):
        torch.testing.assert_close(optimized(make, HALF), expected, rtol=1e-3, atol=1e-4)


@on_ranks(2, timeout=180)
@pytest.mark.parametrize("recomputes", [False, True])
def test_compiled_blocks_compute_what_others_do(recomputes: bool) -> None:
    def trained(compile: bool) -> dict[str, Any]:
        torch.manual_seed(0)
        model = Chain()
        for layer in model.layers:
            Block(layer, recomputes, compile=compile, param_dtype=HALF)
        BMTrainModelWrapper(model, param_dtype=HALF)
        return train_sharded(
            model, lambda call, step, part: call(batch(step).chunk(2)[part]), rank()
        )

    torch.compiler.reset()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
        found = trained(compile=True)
    torch.testing.assert_close(found, trained(compile=False), rtol=1e-6, atol=1e-7)


@on_ranks(1, 2)
def test_float8_gathers_are_roundings_of_what_is_computed_in() -> None:
    pytest.importorskip("torchao", reason="float8 layers are torchao's")
    from float8_models import WIDTH, in_float8

    found = []
    for recipe in ("tensorwise", "gathered"):
        torch.manual_seed(0)
        layer = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
        in_float8(layer, recipe)
        block = Block(layer, param_dtype=HALF)
        weight: Any = layer[0].weight
        out = block(torch.ones(2, WIDTH))
        out.sum().backward()
        assert out.dtype == HALF and weight.grad.dtype == torch.float32
        found.append((out, weight.grad.clone()))
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


# --- models of Hugging Face ---


def loss_of_words(call: Any, step: int, part: int, *, parts: int) -> torch.Tensor:
    from hf_models import inputs

    loss: torch.Tensor = call(**inputs(step, part, parts)).loss
    return loss


@on_ranks(1, 2, init={"gradients": "mean"}, timeout=180)
def test_models_of_hugging_face_train_like_plain_torch() -> None:
    pytest.importorskip("transformers")
    from hf_models import MODELS, built

    from bmt_zero.model_layers import layers_of
    from bmt_zero.param_dtype import kept_by_hugging_face

    for name in MODELS:
        plain, dtypes = built(name).train(), set()
        cast_arguments(layers_of(plain))
        kept = {parameter for parameter, _ in kept_by_hugging_face(plain)}
        assert bool(kept) == (name == "t5")
        loss_of = partial(loss_of_words, parts=world_size())
        expected = train_plainly(plain, kept, loss_of, world_size())
        model: Any = BMTrainModelWrapper(built(name).train(), param_dtype=HALF)
        layers_of(model)[0].register_forward_hook(lambda *_, m=model, d=dtypes: d.add(m.dtype))
        assert_equal(train_sharded(model, loss_of, rank()), expected, rank())
        assert (dtypes, model.dtype) == ({HALF}, torch.float32)


@on_ranks(2, init={"gradients": "mean"}, timeout=120)
def test_a_model_from_the_meta_device_trains_like_plain_torch() -> None:
    pytest.importorskip("transformers")
    from hf_models import MODELS, initialized_by_hugging_face

    loss_of = partial(loss_of_words, parts=2)
    expected = train_plainly(initialized_by_hugging_face("llama").train(), set(), loss_of, 2)
    with torch.device("meta"):
        model = MODELS["llama"]()
    torch.manual_seed(0)
    BMTrainModelWrapper(model, param_dtype=HALF)
    assert_equal(train_sharded(model.train(), loss_of, rank()), expected, rank())


def adapted(*, wraps_first: bool = False, param_dtype: torch.dtype | None = None) -> Any:
    """A model in bfloat16 with adapters that PEFT makes in float32."""
    from hf_models import built
    from peft import LoraConfig, get_peft_model

    model = built("llama").to(HALF).train()
    if wraps_first:
        BMTrainModelWrapper(model, param_dtype=param_dtype)
    torch.manual_seed(1)
    lora = LoraConfig(target_modules="all-linear", r=2, init_lora_weights=False)
    peft = get_peft_model(model, lora)
    trained = {p.dtype for p in peft.parameters() if p.requires_grad}
    assert trained == {torch.float32}
    return peft


@on_ranks(1, 2, init={"gradients": "mean"}, timeout=120)
@pytest.mark.parametrize("wraps_first", [False, True])
def test_float32_adapters_are_computed_in_the_dtype_of_the_model(wraps_first: bool) -> None:
    pytest.importorskip("peft")
    loss_of = partial(loss_of_words, parts=world_size())
    expected = train_plainly(adapted(), set(), loss_of, world_size())
    model = adapted(wraps_first=wraps_first, param_dtype=HALF)
    if not wraps_first:
        BMTrainModelWrapper(model, param_dtype=HALF)
    assert_equal(train_sharded(model, loss_of, rank()), expected, rank())


@on_ranks(2)
@pytest.mark.parametrize("wraps_first", [False, True])
def test_one_line_says_what_float32_adapters_cost(wraps_first: bool) -> None:
    pytest.importorskip("peft")
    line = (
        "its adapters are float32 in a model of torch.bfloat16: they are gathered and multiplied"
        " in float32, which can take a third more time. Wrap it with BMTrainModelWrapper(model,"
        " param_dtype=torch.bfloat16)"
    )
    for dtype, count in ((HALF, 0), (None, 1)):
        with redirect_stdout(StringIO()) as said:
            model = adapted(wraps_first=wraps_first, param_dtype=dtype)
            if not wraps_first:
                BMTrainModelWrapper(model, param_dtype=dtype)
            for _ in range(2):
                torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
        assert said.getvalue().count(line) == (count if rank() == 0 else 0)


@on_ranks(2, init=None)
def test_the_trainer_computes_float32_adapters_in_the_dtype_of_the_model(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    from hf_models import inputs

    import bmt_hf

    rows = inputs(0, 0, 1)
    data = [{name: value[row] for name, value in rows.items()} for row in range(4)]
    arguments = bmt_hf.TrainingArguments(
        tmp_path, max_steps=2, per_device_train_batch_size=2, report_to=[], save_strategy="no",
        disable_tqdm=True, logging_steps=1,
    )  # fmt: skip
    model = adapted()
    head = model.base_model.model.lm_head.to(torch.float32)
    head.register_forward_pre_hook(lambda module, args: (args[0].to(module.weight.dtype),))
    trainer = bmt_hf.Trainer(model, arguments, train_dataset=data)
    read: set[torch.dtype] = set()
    layer = model.base_model.model.model.layers[0]
    layer.register_forward_hook(lambda m, *_: read.update(p.dtype for p in m.parameters()))
    head.register_forward_hook(lambda m, *_: read.add(m.weight.dtype))
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    # A float32 head of the user's is no adapter, and stays.
    assert read == {HALF, torch.float32} and len(losses) == 2
