"""Parallel layers in the place of plain ones of a random model, whose rows are sequences: each rank has its own."""

from __future__ import annotations

import random
from typing import Any

from random_models import WIDTH, Attention, Aux, Counting, Experts, Mlp, Model, Twice
from torch import nn

from bmt_tp import ColumnParallelLinear, RowParallelLinear, VPEmbedding


def parallelize(model: Model, tp: int, r: random.Random) -> None:
    """Put layers that are cut into ``tp`` parts, with the values of those before, where ``r`` draws them and sizes allow it.

    An expert works on a number of rows of its own, or on none, so that experts stay plain.
    """
    dtype = model.embedding.weight.dtype
    skipped = {id(module) for part in model.modules() if isinstance(part, Experts) for module in part.modules()}
    shared = _shared_parameters(model)

    def put(part: nn.Module, name: str, kind: type[nn.Module], **options: Any) -> None:
        old = getattr(part, name)
        new = kind(old.in_features, old.out_features, bias=old.bias is not None, dtype=dtype, **options)
        new.load_state_dict(old.state_dict())
        setattr(part, name, new)

    for part in list(model.layers.modules()):
        is_free = id(part) not in skipped and not any(id(p) in shared for p in part.parameters())
        if not is_free or r.random() < 0.3:
            continue
        chunks = r.choice([1, 2, 3, None])
        if isinstance(part, Mlp) and part.up.out_features % tp == 0:
            if r.random() < 0.7:
                put(part, "up", ColumnParallelLinear, async_gather_chunks=chunks)
            put(part, "down", RowParallelLinear, async_chunks=chunks, split_input=isinstance(part.up, nn.Linear))
        elif isinstance(part, Attention) and part.heads % tp == 0:
            put(part, "qkv", ColumnParallelLinear, sections=[WIDTH] * 3, async_gather_chunks=chunks)
            put(part, "out", RowParallelLinear, async_chunks=chunks)
        elif isinstance(part, (Aux, Counting, Twice)) and WIDTH % tp == 0:
            put(part, "layer", RowParallelLinear, split_input=True, async_chunks=chunks)
    cuts_table, cuts_head = r.random() < 0.5, r.random() < 0.5
    is_tied = model.head.weight is model.embedding.weight
    if cuts_table or (cuts_head and is_tied):
        old = model.embedding
        model.embedding = VPEmbedding(old.num_embeddings, WIDTH, dtype=dtype)
        model.embedding.load_state_dict(old.state_dict())
    if cuts_head or (cuts_table and is_tied):
        put(model, "head", ColumnParallelLinear)
        if is_tied:
            model.head.weight = dict(model.embedding.named_parameters())["weight"]


def _shared_parameters(model: Model) -> set[int]:
    """Return the ids of parameters that several modules have."""
    found = [id(p) for module in model.modules() for p in module.parameters(recurse=False)]
    return {one for one in found if found.count(one) > 1}
