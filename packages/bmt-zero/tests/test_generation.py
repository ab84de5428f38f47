"""Models of Hugging Face generate on all ranks together: each rank what the plain model generates,
until all have finished, with random numbers of its own.
"""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
from hf_models import built
from transformers import T5Config, T5ForConditionalGeneration

from bmt_core.comm.objects import all_gather_object
from bmt_core.run.runtime import current, rank, world_size
from bmt_params.modules.outermost_call import rank_random
from bmt_testing import on_ranks
from bmt_zero import BMTrainModelWrapper
from cells import cells

LENGTH = 5
PROMPT = torch.tensor([[5, 6, 7]])


def t5() -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2}
    return T5ForConditionalGeneration(
        T5Config(**sizes, num_heads=2, decoder_start_token_id=0)
    ).eval()


MODELS = {"llama": lambda: built("llama").eval(), "t5": t5}


def both(name: str) -> tuple[Any, Any]:
    """The plain model, and the wrapped one."""
    return MODELS[name](), BMTrainModelWrapper(MODELS[name]())


def of_ranks(found: torch.Tensor) -> list[list[list[int]]]:
    return all_gather_object(found.tolist(), current().world)


@on_ranks(4)
@cells("name", MODELS)
def test_samples_are_the_ranks_own_and_repeat_with_the_seed(name: str) -> None:
    plain, model = both(name)
    options: dict[str, Any] = {
        "do_sample": True,
        "max_new_tokens": LENGTH,
        "min_new_tokens": LENGTH,
        "top_k": 0,
    }
    samples = []
    for _ in range(2):
        torch.manual_seed(7)
        samples.append(model.generate(PROMPT, **options))
        after = torch.get_rng_state()
    assert torch.equal(*samples)
    assert len({str(sample) for sample in of_ranks(samples[0])}) == world_size()
    torch.manual_seed(7)
    with rank_random(current()):
        assert torch.equal(plain.generate(PROMPT, **options), samples[0])
    # The program's own generator goes on alike on all ranks.
    assert len({str(state) for state in all_gather_object(after.tolist(), current().world)}) == 1


@on_ranks(4)
@cells("option", [{}, {"synced_gpus": False}])
def test_a_rank_that_has_finished_waits_for_the_others(option: dict[str, Any]) -> None:
    plain, model = both("llama")
    prompts = [PROMPT + index for index in range(world_size())]
    written = [plain.generate(p, max_new_tokens=LENGTH, eos_token_id=None)[0, 3:] for p in prompts]
    # A word that ends the text of some ranks before that of others.
    options = {"max_new_tokens": LENGTH, "pad_token_id": 0, "eos_token_id": int(written[0][1])}
    expected = [plain.generate(p, **options).tolist() for p in prompts]
    assert len({len(text[0]) for text in expected}) > 1
    assert of_ranks(model.generate(prompts[rank()], **options, **option)) == expected


@on_ranks(2)
def test_a_model_in_plain_torch_generates_as_ever() -> None:
    plain = MODELS["llama"]()
    torch.manual_seed(7)
    first = plain.generate(PROMPT, do_sample=True, max_new_tokens=LENGTH)
    assert len({str(sample) for sample in of_ranks(first)}) == 1
