"""``Case``: one cell of the table, one toolkit at one batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from bench.models import SIZES, Size
from bench.real_models import RealModel

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the cases of a run have in common.

    ``tp`` is the size of tensor-parallel groups, in which each rank trains on the sequences of all;
    other toolkits shard over the ranks of such a group as over any others. ``cp`` is over how many
    ranks each sequence of a real model is divided. ``pp`` is the number of stages of a pipeline,
    which trains on the sequences of its ranks in micro-batches of ``micro_batch``, by ``schedule``;
    other toolkits do the same as with tp. ``float8`` is the recipe of torchao by which the blocks'
    linear layers compute, if they do. ``overlap_forward``: whether bmt's Adam updates while the
    next forward begins. ``device_memory``, in bytes, is for the optimizer ``adam_offload``.
    ``shard_size`` is over how many ranks parameters are sharded, where the rest of the ranks hold
    copies of them; None: all. ``optimizer_shards`` "all" shards bmt's optimizer states over all
    ranks nevertheless. ``fused_loss``: whether logits are never whole, by bmt's loss or Liger's.
    ``offload_inputs`` and ``tile`` are those of bmt's Blocks; MLPs and norms are computed in tiles.
    ``first_sequence``: the length of the sequences of warm-up, None: that of all.
    """

    size: str
    level: int
    recompute: bool
    fused_loss: bool
    offload_inputs: bool
    tile: int | None
    first_sequence: int | None
    compile: bool
    dtype: str
    float8: str | None
    optimizer: str
    device_memory: int | Literal["auto"]
    overlap_forward: bool
    tp: int
    cp: int
    pp: int
    shard_size: int | None
    optimizer_shards: Literal["all"] | None
    micro_batch: int
    schedule: str
    warmup: int
    steps: int


@dataclass(frozen=True, kw_only=True)
class Case(Settings):
    """What is trained, how, and for how many steps. ``batch`` is sequences per rank, or along
    ``cp`` those of a group.

    ``model`` is trained in place of a GPT, if there is one. ``keep`` is what recomputation keeps,
    None: nothing. ``reduce_dtype`` is what the toolkit is told to reduce gradients in; None leaves
    it to the toolkit.
    """

    toolkit: str
    model: RealModel | None
    keep: str | None
    reduce_dtype: str | None
    batch: int

    @property
    def shape(self) -> Size | RealModel:
        """The model's shape."""
        return self.model or SIZES[self.size]

    @property
    def gpt(self) -> Size:
        """The shape of the GPT, of a case without ``model``."""
        return SIZES[self.size]

    @property
    def name(self) -> str:
        """A name for files, of what differs in one run."""
        kept = "" if self.keep is None else f"-keep-{self.keep}"
        return f"{self.toolkit}-batch{self.batch}{kept}"
