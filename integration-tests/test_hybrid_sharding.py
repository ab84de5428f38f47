"""Hybrid sharding: parameters are sharded over ``shard_size`` ranks and replicated over the others,
or gathered among these ranks and sharded over all (``optimizer_shards="all"``), and training equals
plain torch. Random trainings draw both with everything else.
"""

from __future__ import annotations

import ast
import copy
import os
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from beside_torch import train_beside_torch
from chain_models import Chain, split
from chain_models import batch as chain_batch
from offload_training import Offload
from torch import nn

from bmt_core import BmtError, ConfigError
from bmt_core.run.collectives import all_reduce
from bmt_core.run.runtime import current, init_distributed, shutdown
from bmt_optim import AdamOptimizer, whole
from bmt_params import DistributedParameter
from bmt_testing import TrainingSettings, assert_matches_single, on_ranks, run_ranks
from bmt_zero import Block, BMTrainModelWrapper
from cells import cells


class Model(nn.Module):
    """An embedding outside of Blocks, layers of sizes that nothing divides, and a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 5)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5)) for _ in range(3)
        )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer(x)
        logits = x @ self.embedding.weight.t()
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def batch(seed: int) -> torch.Tensor:
    return torch.randint(13, (4, 6), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("levels", "dtype", "shard_size", "optimizer_shards"),
    [
        ((0,), "float64", 2, None),
        ((1,), "float64", 2, "all"),
        ((2,), "float64", 1, "all"),
        ((3,), "float64", 2, "all"),
        ((3, 0, 2), "bfloat16", 1, "all"),
        ((3, 0, 2), "bfloat16", 2, None),
    ],
)
def test_training_equals_plain_torch(
    levels: Any, dtype: Any, shard_size: int, optimizer_shards: Any
) -> None:
    settings = TrainingSettings(
        ranks=4,
        shard_size=shard_size,
        optimizer_shards=optimizer_shards,
        levels=levels,
        dtype=dtype,
        recompute=(True, False),
        micro_batches=2,
        no_sync=levels == (1,),
        gradients="sum" if len(levels) > 1 else "mean",
        max_norm=0.1 if len(levels) > 1 else None,
        optimizer="adam",
        reload=True,
    )
    assert_matches_single(Model, batch, settings=settings)


@pytest.mark.parametrize(("axis", "optimizer_shards"), [("tp", "all"), ("pp", None), ("pp", "all")])
def test_training_with_other_axes_equals_plain_torch(axis: str, optimizer_shards: Any) -> None:
    settings = TrainingSettings(
        ranks=4,
        axes={axis: 2},
        shard_size=1,  # of two ranks that see different data
        optimizer_shards=optimizer_shards,
        levels=(3, 0, 2),
        recompute=(True, False),
        micro_batches=2,
        gradients="sum",
        max_norm=0.1,
        optimizer="adam",
        reload=True,
    )
    assert_matches_single(
        Chain,
        chain_batch,
        settings=settings,
        parallelize=split if axis == "tp" else None,
        pipeline="layers" if axis == "pp" else None,
    )


@on_ranks(4, init={"shard_size": 2})
def test_each_group_of_ranks_has_all_elements_and_the_others_the_same() -> None:
    rank, topology = current().rank, current().topology
    assert topology.sharing_group().ranks == (0, 1, 2, 3) and topology.other_axes == {}
    assert topology.replica_group is not None
    assert topology.replica_group.ranks == ((0, 2) if rank % 2 == 0 else (1, 3))
    model = BMTrainModelWrapper(Model())
    for p in model.parameters():
        assert isinstance(p, DistributedParameter)
        assert p.shard_group.ranks == ((0, 1) if rank < 2 else (2, 3))
        assert p.replicas == 2
        parts = p.gather_like(p.detach()).flatten()
        start, end = p.shard.ranges[rank % 2]
        assert torch.equal(parts[start:end], p.detach())


@on_ranks(4, init={"shard_size": 2, "optimizer_shards": "all"})
def test_parts_of_all_ranks_are_the_whole_where_two_ranks_gather() -> None:
    rank = current().rank
    torch.manual_seed(0)
    plain = Model()
    model = BMTrainModelWrapper(copy.deepcopy(plain))
    model(batch(0))
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert isinstance(p, DistributedParameter)
        assert p.shard_group.ranks == (0, 1, 2, 3) and p.replicas == 1
        start, end = p.shard.ranges[rank]
        assert torch.equal(q.detach().flatten()[start:end], p.detach())
        assert torch.equal(p.gather(), q)
    stages = current().topology.two_stages(current().topology.shard_group())
    assert stages is not None
    assert [group.ranks for group in stages] == [
        ((0, 1), (2, 3))[rank // 2],
        ((0, 2), (1, 3))[rank % 2],
    ]
    # Neighbours in the flat tensor are two ranks apart, so that what a rank gathers first
    # lies together.
    layer = nn.Linear(32, 32, bias=False)
    whole = layer.weight.detach().clone()
    weight = Block(layer).weight
    assert [start for start, _ in weight.shard.ranges] == [0, 512, 256, 768]
    assert torch.equal(weight.gather(), whole)


@on_ranks(4, init={"shard_size": 2, "optimizer_shards": "all"})
def test_a_block_over_all_ranks_gathers_from_all() -> None:
    torch.manual_seed(0)
    near, everywhere = Block(nn.Linear(32, 32)), Block(nn.Linear(32, 32), shard_size="all")
    x = torch.ones(1, 32)
    everywhere(near(x)).sum().backward()
    assert near.weight.shard.ranges != everywhere.weight.shard.ranges
    copied = copy.deepcopy(near)
    assert torch.equal(copied(x), near(x))
    with torch.no_grad():
        near.weight.mul_(2)  # by hand, on all ranks
        near.bias.zero_()
    assert torch.allclose(near(x), 2 * (copied(x) - copied.bias.gather()))


@on_ranks(4, init={"shard_size": 2, "optimizer_shards": "all", "gradients": "mean"})
@cells("level", [1, 2, 3])
def test_steps_by_hand_without_a_count_of_versions_are_gathered(level: int) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(32, 32)
    block = Block(copy.deepcopy(plain), zero_level=level)
    x = torch.ones(1, 32)
    for _ in range(3):
        for model in (plain, block):
            model(x).square().sum().backward()
            for p in model.parameters():
                if p.numel():  # of the bias three ranks have nothing
                    assert p.grad is not None
                    p.data.sub_(p.grad, alpha=0.01)
                p.grad = None
        torch.testing.assert_close(block(x), plain(x))


def pickled_layer(path: str) -> None:
    weight = Block(nn.Linear(32, 32), zero_level=3).weight
    torch.save(weight, f"{path}/{current().rank}")


def unpickle(path: str) -> None:
    with pytest.raises(ConfigError, match="was pickled in a run with another shard_size or other"):
        torch.load(f"{path}/{current().rank}", weights_only=False)


def test_a_parameter_that_others_copied_is_not_loaded_where_nobody_does(tmp_path: Path) -> None:
    run_ranks(pickled_layer, 4, str(tmp_path), init={"shard_size": 2})
    run_ranks(unpickle, 4, str(tmp_path), init={"shard_size": 2, "optimizer_shards": "all"})


@on_ranks(4, init=None)
@cells("size, shards", [(None, None), (4, None), (2, None), (1, None), (2, "all"), (1, "all")])
def test_states_take_as_much_as_parts(size: int | None, shards: Any) -> None:
    init_distributed(device="cpu", shard_size=size, optimizer_shards=shards)
    model = BMTrainModelWrapper(Model())
    optimizer = AdamOptimizer(model.parameters())
    model(batch(0)).backward()
    optimizer.step()
    own = sum(p.numel() for p in model.parameters())
    assert own == sum(state["exp_avg"].numel() for state in optimizer.state.values())
    copies = 1 if shards == "all" else 4 // (size or 4)
    total = sum(p.numel() for p in Model().parameters())
    assert all_reduce(torch.tensor(own)) == total * copies
    shutdown()


@on_ranks(4, init={"shard_size": 2})
def test_values_that_differ_between_replicas_are_refused() -> None:
    torch.manual_seed(current().rank // 2)  # each replica draws another model
    model = BMTrainModelWrapper(Model())
    with pytest.raises(ConfigError, match="has other values on rank 2 than on rank 0"):
        model(batch(0))


@pytest.mark.parametrize("optimizer_shards", [None, "all"])
def test_whole_tensors_lie_on_one_of_all_ranks_and_offloaded_states_with_their_parts(
    optimizer_shards: Any,
) -> None:
    init = {"shard_size": 2, "optimizer_shards": optimizer_shards}
    run_ranks(train_with_whole_tensors, 4, init=init)
    found = run_ranks(train_offloaded, 4, init=init)
    copies = 1 if optimizer_shards == "all" else 2
    assert sum(found) == copies * sum(p.numel() for p in Model().parameters())


def train_with_whole_tensors() -> None:
    options = {"lr": 0.1, "momentum": 0.9}
    model, plain = BMTrainModelWrapper(seeded()), seeded()
    optimizer = train_beside_torch(
        *(model, plain, *LOSSES),
        make=partial(whole, torch.optim.SGD, **options),
        make_of_torch=partial(torch.optim.SGD, **options),
        atol=1e-5,
    )
    owners = [optimizer.state_owner(p).rank for p in model.parameters()]
    assert len(set(owners)) == 4


def train_offloaded() -> int:
    optimizer = train_beside_torch(
        *(BMTrainModelWrapper(seeded()), seeded(), *LOSSES),
        make=partial(Offload, lr=0.1, overlap_forward=True),
        make_of_torch=partial(torch.optim.Adam, lr=0.1),
        atol=1e-5,
    )
    return sum(state["exp_avg"].numel() for state in optimizer.state.values())


def seeded() -> Model:
    torch.manual_seed(0)
    return Model()


LOSSES = (
    lambda model, step, part, parts: model(batch(4 * step + part)),
    lambda plain, step, *_: torch.stack([plain(batch(4 * step + n)) for n in range(4)]).mean(),
)
"""The loss of a rank's batch, and that of all."""


@on_ranks(4, init={"shard_size": 2})
def test_a_block_may_be_sharded_over_all_ranks() -> None:
    sharded, plain = seeded(), seeded()
    for number, layer in enumerate(sharded.layers):
        Block(layer, zero_level=3 - number, shard_size=(None, "all", 4)[number])
    model = BMTrainModelWrapper(sharded)
    train_beside_torch(
        *(model, plain, *LOSSES),
        make=partial(AdamOptimizer, lr=0.1),
        make_of_torch=partial(torch.optim.Adam, lr=0.1),
        atol=1e-5,
    )
    for name, p in model.named_parameters():
        assert isinstance(p, DistributedParameter)
        is_over_all = name.startswith(("layers.1", "layers.2"))
        assert p.shard_group.size == (4 if is_over_all else 2)
        assert p.replicas == (1 if is_over_all else 2)
    own = torch.tensor(float(sum(p.numel() for p in model.parameters())))
    current().world.all_reduce(own).wait()
    over_all = sum(p.numel() for p in plain.layers[1:].parameters())
    assert own == 2 * sum(p.numel() for p in plain.parameters()) - over_all
    copied = copy.deepcopy(model)
    copied(batch(0)).backward()
    for p, q in zip(copied.parameters(), model.parameters(), strict=True):
        assert isinstance(p, DistributedParameter) and isinstance(q, DistributedParameter)
        assert p.shard_group is q.shard_group and p.replicas == q.replicas
    copied.layers[1].extra = added = nn.Parameter(torch.ones(3))
    copied(batch(0))
    assert isinstance(added, DistributedParameter) and added.shard_group.size == 4


@on_ranks(4, init={"shard_size": 2})
def test_copies_of_a_part_are_summed_wherever_the_parameter_was_before() -> None:
    given = DistributedParameter(torch.ones(3), group=current().topology.shard_group())
    assert given.replicas == 2
    before = Block(nn.Linear(3, 3), shard_size="all")
    after = nn.Linear(3, 3)
    after.weight = before.weight
    del before
    Block(after, local_axes=("tp",))
    for p in after.parameters():
        assert isinstance(p, DistributedParameter)
        assert p.shard_group.size == 2 and p.replicas == 2


@on_ranks(4, init={"shard_size": 2})
def test_other_shard_sizes_of_a_block_are_refused() -> None:
    for size in (3, 0, 8, True):
        with pytest.raises(
            ConfigError,
            match=rf"has shard_size=2, that of init_distributed.., or 4, all .* and not {size}\."
            " No run can have it, because it does not divide 4.$",
        ):
            Block(nn.Linear(3, 3), shard_size=size)


@on_ranks(4, init=None)
@cells("asked, size", [(1, 1), (2, 2), ("host", 4)])
def test_a_shard_size_of_one_block_is_had_as_the_error_says(asked: Any, size: int) -> None:
    """A run with another shard size refuses the one that is ``asked`` of a Block, and says how to
    start a run in which the Block is sharded over these ``size`` ranks.
    """
    init_distributed(device="cpu", shard_size=2 if asked != 2 else None)
    with pytest.raises(ConfigError) as raised:
        Block(nn.Linear(3, 3), shard_size=asked)
    advice = re.search(
        r"start with init_distributed\(shard_size=(.+?)\), leave it out here, and give all other"
        r' layers Block\(..., shard_size="all"\)',
        str(raised.value),
    )
    assert advice is not None
    shutdown()
    init_distributed(device="cpu", shard_size=ast.literal_eval(advice[1]))
    for block, expected in (
        (Block(nn.Linear(3, 3)), size),
        (Block(nn.Linear(3, 3), shard_size="all"), 4),
    ):
        for p in block.parameters():
            assert isinstance(p, DistributedParameter) and p.shard_group.size == expected
    shutdown()


def start(**settings: Any) -> str:
    try:
        init_distributed(device="cpu", timeout=30, **settings)
    except BmtError as error:
        return str(error)
    try:
        return current().describe()
    finally:
        shutdown()


SAID: list[tuple[Any, Any, str]] = [
    (3, None, "shard_size=3 does not divide the 4 ranks that see different data. Give one of 1, 2"),
    (8, None, "shard_size=8 does not divide the 4 ranks"),
    (0, None, "shard_size must be at least 1, not 0"),
    (True, None, "shard_size must be a whole number, at least 1, not True"),
    ("hosts", None, "must be a number of ranks or \"host\" (those of one host), not 'hosts'"),
    ("host", None, "bmt: 4 ranks (dp=4) on cpu"),  # all ranks are on one host
    (2, None, "bmt: 4 ranks (replica=2 x dp=2) on cpu"),
    (4, None, "bmt: 4 ranks (dp=4) on cpu"),
    (None, None, "bmt: 4 ranks (dp=4) on cpu"),
    (2, "all", "bmt: 4 ranks (replica=2 x dp=2, optimizer states over all) on cpu"),
    (None, "all", "bmt: 4 ranks (dp=4) on cpu"),
    (4, "all", "bmt: 4 ranks (dp=4) on cpu"),
    (2, "host", 'optimizer_shards must be "all" (all ranks that see different data) or None'),
    (2, True, "or None (those of shard_size), not True"),
]


@on_ranks(4, init=None)
def test_the_run_says_how_it_shards_or_why_it_cannot() -> None:
    for size, shards, part in SAID:
        assert part in start(shard_size=size, optimizer_shards=shards), (size, shards)


HOSTS: list[tuple[list[int], dict[str, Any], str]] = [
    ([2, 2], {}, "(replica=2 x dp=2)"),
    ([1, 1, 1, 1], {}, "(replica=4 x dp=1)"),
    ([2, 2], {"tp_size": 2}, "(replica=2 x dp=1 x tp=2)"),
    ([4], {"pipe_size": 2}, "(pp=2 x dp=2)"),
    ([2, 2], {"pipe_size": 2}, "(pp=2 x dp=2)"),
    ([2, 2], {"tp_size": 4}, "the 2 ranks of this host cannot be divided by tp_size=4. Give"),
    ([1, 3], {}, "ranks of the host"),
]


@on_ranks(4, init=None)
@cells("ranks_of_hosts, settings, part", HOSTS)
def test_the_ranks_of_a_host_shard_and_hosts_replicate(
    ranks_of_hosts: list[int], settings: dict[str, Any], part: str
) -> None:
    """Start as on hosts that have so many ranks each."""
    rank = int(os.environ["RANK"])
    hosts = [host for host, ranks in enumerate(ranks_of_hosts) for _ in range(ranks)]
    host = hosts[rank]
    os.environ["LOCAL_WORLD_SIZE"] = str(ranks_of_hosts[host])
    os.environ["LOCAL_RANK"] = str(rank - hosts.index(host))
    assert part in start(shard_size="host", **settings)
