"""``attn_implementation="bmt_cp"``: models of Hugging Face train on divided sequences as on one
process, with their own attention.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch

pytest.importorskip("transformers")
from context_hugging_face import CONFIGS, Divided, batch, model_of

import bmt_cp
from bmt_testing import TrainingSettings, assert_matches_single


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
