"""LoRA by PEFT, put in before the model is wrapped or after: trained, counted, merged and saved as
in one plain process.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from bmt_testing import run_ranks

pytestmark = pytest.mark.skipif(
    any(find_spec(name) is None for name in ("peft", "transformers")),
    reason="needs peft and transformers",
)


def run_all(directory: str) -> Any:
    import peft_models

    return peft_models.run_all(directory)


def run_split_layers() -> Any:
    import peft_split_layers

    return peft_split_layers.run_all()


def run_late_adapters(directory: str) -> Any:
    import peft_late_adapters

    return peft_late_adapters.run_all(directory)


def close(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_lora_equals_plain_torch_with_peft(tmp_path: Path) -> None:
    # One test: importing PEFT takes each rank longer than all that is tested.
    for cases, example in run_ranks(run_all, 2, str(tmp_path), init=None, timeout=180):
        assert len(cases) == 6
        for case in cases:
            close(case["sharded"], case["plain"])
            before, merged, unmerged, unloaded = case["plain"]["logits"]
            close([merged, unmerged, unloaded, *case["reloaded"]], [before] * 5)
        first, trained, begun_with_export, export_in_plain_torch, by_muon = example
        assert trained < first - 0.05 and by_muon < first - 0.05
        assert by_muon != trained
        close([begun_with_export, export_in_plain_torch], [trained, trained])


@pytest.mark.slow("bmt-params", "bmt-tp", "bmt-zero")
def test_adapters_on_split_layers_are_refused_on_every_rank_and_those_on_whole_layers_train() -> (
    None
):
    for said, (plain, split) in run_ranks(run_split_layers, 2, init={"tp_size": 2}, timeout=180):
        assert len(said) == 16
        for (order, target), text in said.items():
            assert (
                f"{target}, a " in text
                if order == "before_the_plan"
                else f"{target}.weight of shape" in text
            ), text
            assert "adapter (LoRA)" in text and "merge" in text.lower(), text
        assert len(plain) == 3
        close(split, plain)


@pytest.mark.slow("bmt-checkpoint", "bmt-optim", "bmt-params", "bmt-zero")
def test_adapters_that_are_made_late_are_those_of_plain_torch(tmp_path: Path) -> None:
    for pairs, by_rates_of_parts, saved, said in run_ranks(
        run_late_adapters, 2, str(tmp_path), timeout=180
    ):
        for plain, sharded in pairs:
            close(sharded, plain)
        close(by_rates_of_parts, pairs[-1][0])
        expected, *loaded = saved
        close(loaded, [expected] * 2)
        assert len(said) == 6
        phrases = ["'gate_up_proj' of a Mixtral", "(AdaLoRA)", "is quantized (bitsandbytes)"]
        assert [phrase in text for phrase, text in zip(phrases, said[::2], strict=True)] == [
            True
        ] * 3
        # With an adapter, the quantized model is the one below it.
        assert said[1::2] == said[::2]
