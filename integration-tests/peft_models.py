"""What ``test_peft.py`` runs on ranks: fine-tuning with PEFT, sharded and in plain torch, and the
script of ``examples/hf``.

A module of its own, so that the test's process imports neither PEFT nor Transformers, which takes
longer than all of this.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from hf_models import built, inputs
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

import bmtrain as bmt
import finetune

STEPS = 3


class Case(NamedTuple):
    """A model, the layers that get adapters, whether they get them after the model is wrapped, and
    how it is trained.
    """

    model: str
    targets: list[str]
    is_wrapped_first: bool
    levels: tuple[int, int] = (3, 3)
    use_checkpoint: bool = True
    options: dict[str, Any] = {}

    def config(self) -> LoraConfig:
        # Adapters that begin at zero would hide a wrong merge.
        options = {"init_lora_weights": False, **self.options}
        return LoraConfig(
            r=4, target_modules=self.targets, task_type="CAUSAL_LM", lora_alpha=16, **options
        )


OUTSIDE_OF_BLOCKS = ["q_proj", "lm_head", "embed_tokens"]
CASES = [
    # Square weights: two parts of a pair have a product.
    Case("llama", ["q_proj", "o_proj"], False, (3, 2)),
    Case("llama", ["q_proj", "o_proj"], True, (1, 3), False, {"modules_to_save": ["lm_head"]}),
    Case("llama", OUTSIDE_OF_BLOCKS, False, (2, 1)),
    Case("llama", OUTSIDE_OF_BLOCKS, True),
    # Conv1D, whose sizes PEFT asks of the weight.
    Case("gpt2", ["c_attn", "mlp.c_proj"], True, (2, 3), False),
    # Whose first values depend on the weight.
    Case("llama", ["v_proj"], True, (3, 3), False, {"use_dora": True}),
]


def with_adapters(case: Case, sharded: bool) -> PeftModel:
    model: Any = built(case.model)
    torch.manual_seed(1)
    if sharded and case.is_wrapped_first:
        bmt.BMTrainModelWrapper(model)
    with bmt.whole_parameters(model) if case.options.get("use_dora") else nullcontext():
        model = get_peft_model(model, case.config())
    if sharded and not case.is_wrapped_first:
        bmt.BMTrainModelWrapper(model)
    if sharded:
        blocks = [module for module in model.modules() if isinstance(module, bmt.Block)]
        for block, level in zip(blocks, case.levels, strict=True):
            block._zero_level, block._use_checkpoint = level, case.use_checkpoint
    return model


@torch.no_grad()
def logits(model: nn.Module) -> torch.Tensor:
    output: torch.Tensor = model(**inputs(9, 0, 1)).logits
    return output


@torch.no_grad()
def gathered_adapters(model: nn.Module) -> dict[str, torch.Tensor]:
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return {
        name: p.gather_all() if isinstance(p, bmt.DistributedParameter) else p
        for name, p in trained.items()
    }


def fine_tune(case: Case, directory: str | None) -> dict[str, Any]:
    """Train, count, save the adapters, merge them, and return what came of all that; in plain torch
    without ``directory``.
    """
    model = with_adapters(case, sharded=directory is not None).train()
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=1e-2, eps=1e-3
    )
    manager = bmt.optim.OptimManager()
    manager.add_optimizer(optimizer)
    losses = []
    for step in range(STEPS):
        # Each part's mean is over its own words: in one process the loss is the mean of both means.
        parts = [0, 1] if directory is None else [bmt.rank()]
        loss = torch.stack([model(**inputs(step, part, 2)).loss for part in parts]).mean()
        manager.zero_grad()
        manager.backward(loss)
        manager.step()
        losses.append(loss.item() if directory is None else bmt.sum_loss(loss).item())
    model.eval()
    counts = model.get_nb_trainable_parameters(), model.get_base_model().num_parameters()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    found = [logits(model)]
    if directory is not None:
        adapters = None if case.targets == OUTSIDE_OF_BLOCKS else gathered_adapters(model)
        model.save_pretrained(directory, state_dict=adapters, is_main_process=bmt.rank() == 0)
    model.merge_adapter()
    found.append(logits(model))
    model.unmerge_adapter()
    found.append(logits(model))
    merged = model.merge_and_unload()
    assert not any(hasattr(module, "get_base_layer") for module in merged.modules())
    found.append(logits(merged))
    if directory is not None:
        bmt.save(merged, f"{directory}/merged/")
        merged.config.save_pretrained(f"{directory}/merged")
    return {"losses": losses, "counts": counts, "state": state, "logits": found}


def reloaded(case: Case, directory: str) -> list[torch.Tensor]:
    """Logits of the plain model with the adapters that were saved, and of the merged model."""
    adapted = PeftModel.from_pretrained(built(case.model), directory)
    merged = type(built(case.model)).from_pretrained(f"{directory}/merged")
    return [logits(model.eval()) for model in (adapted, merged)]


def compare(directory: str) -> list[dict[str, Any]]:
    """Per case: what is expected, what came, and what the saved files give."""
    plain = [fine_tune(case, None) for case in CASES]
    bmt.init_distributed(device="cpu")
    found = [fine_tune(case, f"{directory}/{number}") for number, case in enumerate(CASES)]
    bmt.shutdown()
    return [
        {"plain": expected, "sharded": result, "reloaded": reloaded(case, f"{directory}/{number}")}
        for number, (case, expected, result) in enumerate(zip(CASES, plain, found, strict=True))
    ]


def run_example(directory: str) -> list[float]:
    """Held-out losses: before, after, when it begins with what it exported, of that export in plain
    torch, and after training by Muon.
    """
    options = ["--device=cpu", "--length=32", "--new-tokens=4"]
    options += ["--steps=5", "--batch-size=2", "--zero-level=2"]
    first = finetune.main([*options, "--out", f"{directory}/first"])
    again = ["--model", f"{directory}/first", "--steps", "0", "--no-checkpoint"]
    second = finetune.main([*options, "--out", f"{directory}/second", *again])
    by_muon = finetune.main([*options, "--out", f"{directory}/muon", "--optimizer", "muon"])
    model: Any = AutoModelForCausalLM.from_pretrained(f"{directory}/first").eval()
    told = finetune.parser().parse_args(options)
    held_out = finetune.windows(told, AutoTokenizer.from_pretrained(f"{directory}/first"), 2)[1]
    with pytest.raises(ValueError, match=r"0 windows of --length 1000000\. 2 ranks need 3 or more"):
        finetune.windows(
            finetune.parser().parse_args(["--length", "1000000"]), finetune.byte_tokenizer(), 2
        )
    with mock.patch("sys.argv", ["finetune.py", "--zero-level", "4"]), pytest.raises(SystemExit):
        finetune.run()
    missing = ["finetune.py", "--device", "cpu", "--data", f"{directory}/missing"]
    one_line = r"^finetune.py, rank \d: FileNotFoundError: .*/missing'$"
    with mock.patch("sys.argv", missing), pytest.raises(SystemExit, match=one_line):
        finetune.run()
    bmt.shutdown()
    rows = held_out[: 2 * min(len(held_out) // 2, 8 * told.batch_size)]
    with torch.no_grad():
        plain = float(model(input_ids=rows, labels=rows).loss)
    return [first["before"], first["after"], second["before"], plain, by_muon["after"]]


def run_all(directory: str) -> tuple[list[dict[str, Any]], list[float]]:
    Path(directory).mkdir(exist_ok=True)
    return compare(directory), run_example(directory)
