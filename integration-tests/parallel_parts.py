"""Parallel layers in the place of plain ones of a random model.

Either rows are sequences, of which each rank along tp has its own; or all of these ranks have the
same sequences, and pass whole activations from layer to layer.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from random_models import WIDTH, Attention, Aux, Counting, Experts, Mlp, Model, Twice
from torch import nn

from bmt_params import DistributedParameter, Locality, set_locality
from bmt_tp import ColumnParallelLinear, RowParallelLinear, VPEmbedding
from bmt_tp import whole as declare_whole


def parallelize(model: Model, tp: int, r: random.Random, *, whole: bool) -> None:
    """Put layers that are cut into ``tp`` parts, with the values of those before, where ``r`` draws
    them and sizes allow it.

    An expert works on a number of rows of its own, or on none, so that experts stay plain.
    ``whole``: the ranks have the same sequences, and what stays plain is declared.
    """
    dtype = model.embedding.weight.dtype
    skipped = {
        id(module)
        for part in model.modules()
        if isinstance(part, Experts)
        for module in part.modules()
    }
    shared = _shared_parameters(model)

    def put(part: nn.Module, name: str, kind: type[nn.Module], **options: Any) -> None:
        old = getattr(part, name)
        new = kind(
            old.in_features, old.out_features, bias=old.bias is not None, dtype=dtype, **options
        )
        new.load_state_dict(old.state_dict())
        setattr(part, name, new)

    for part in list(model.layers.modules()):
        is_free = id(part) not in skipped and not any(id(p) in shared for p in part.parameters())
        if not is_free or r.random() < 0.3:
            continue
        chunks = r.choice([1, 2, 3, None])
        if whole:
            _put_among_whole_activations(part, tp, put)
            continue
        if isinstance(part, Mlp) and part.up.out_features % tp == 0:
            if r.random() < 0.7:
                put(part, "up", ColumnParallelLinear, async_gather_chunks=chunks)
            put(
                part,
                "down",
                RowParallelLinear,
                async_chunks=chunks,
                split_input=isinstance(part.up, nn.Linear),
            )
        elif isinstance(part, Attention) and part.heads % tp == 0:
            put(part, "qkv", ColumnParallelLinear, sections=[WIDTH] * 3, async_gather_chunks=chunks)
            put(part, "out", RowParallelLinear, async_chunks=chunks)
        elif isinstance(part, (Aux, Counting, Twice)) and WIDTH % tp == 0:
            put(part, "layer", RowParallelLinear, split_input=True, async_chunks=chunks)
    if whole:
        if model.head.weight is not model.embedding.weight:
            put(
                model,
                "head",
                ColumnParallelLinear,
                gather_input=False,
                gather_output=r.random() < 0.5,
            )
        declare_whole(model)
        return
    for part in model.layers.modules():
        # Part of its loss has no rows, and so the same gradient on all ranks, to be summed.
        if isinstance(part, Aux):
            set_locality(part, Locality("tp", gradients="share"))
    cuts_table, cuts_head = r.random() < 0.5, r.random() < 0.5
    if not any(isinstance(parameter, DistributedParameter) for parameter in model.parameters()):
        cuts_table = True  # a model of which nothing is cut is refused
    is_tied = model.head.weight is model.embedding.weight
    if cuts_table or (cuts_head and is_tied):
        old = model.embedding
        model.embedding = VPEmbedding(old.num_embeddings, WIDTH, dtype=dtype)
        model.embedding.load_state_dict(old.state_dict())
    if cuts_head or (cuts_table and is_tied):
        put(model, "head", ColumnParallelLinear)
        if is_tied:
            model.head.weight = dict(model.embedding.named_parameters())["weight"]


def _put_among_whole_activations(part: nn.Module, tp: int, put: Callable[..., None]) -> None:
    if isinstance(part, Mlp) and part.up.out_features % tp == 0:
        put(part, "up", ColumnParallelLinear, gather_input=False)
        put(part, "down", RowParallelLinear, all_reduce_output=True)
    elif isinstance(part, Attention) and part.heads % tp == 0:
        put(part, "qkv", ColumnParallelLinear, sections=[WIDTH] * 3, gather_input=False)
        put(part, "out", RowParallelLinear, all_reduce_output=True)
    elif isinstance(part, (Aux, Counting, Twice)) and WIDTH % tp == 0:
        put(part, "layer", ColumnParallelLinear, gather_input=False, gather_output=True)


def _shared_parameters(model: Model) -> set[int]:
    """Return the ids of parameters that several modules have."""
    found = [id(p) for module in model.modules() for p in module.parameters(recurse=False)]
    return {one for one in found if found.count(one) > 1}
