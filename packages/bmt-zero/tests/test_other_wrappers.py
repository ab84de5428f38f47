"""What other toolkits offer for whole parameters is refused for parts, with the way that bmt has
for it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from zero_models import wrapped_root

from bmt_core import ConfigError
from bmt_core.run.runtime import world_size
from bmt_params import DistributedModule
from bmt_testing import on_ranks
from bmt_zero import Block, BMTrainModelWrapper
from cells import cells


def in_plain() -> nn.Module:
    """A plain model of which a part is wrapped."""
    return nn.Sequential(wrapped_root(), nn.Linear(5, 5))


@on_ranks(2)
@cells("make", [wrapped_root, in_plain])
def test_distributed_data_parallel_is_refused(make: Callable[[], nn.Module]) -> None:
    with pytest.raises(ConfigError, match=r"DistributedDataParallel would.*OptimManager"):
        DistributedDataParallel(make())
    DistributedDataParallel(nn.Linear(2, 2))(torch.ones(1, 2)).sum().backward()


def a_block_of_a_model() -> nn.Module:
    block: nn.Module = wrapped_root().layers[0]
    return block


def fully_shard_list(module: nn.Module) -> Any:
    return fully_shard([module])


@on_ranks(2)
@cells("wrap", [fully_shard, fully_shard_list, replicate, FullyShardedDataParallel])
@cells("make", [wrapped_root, in_plain, a_block_of_a_model])
def test_sharding_what_is_sharded_is_refused_and_changes_nothing(
    make: Callable[[], nn.Module], wrap: Any
) -> None:
    def looks() -> dict[str, Any]:
        return {
            name: (type(module), dict(module._parameters)) for name, module in model.named_modules()
        }

    model = make()
    before = looks()
    name = "fully_shard" if wrap is fully_shard_list else wrap.__name__
    with pytest.raises(ConfigError, match=f'^{name} would shard(.|\n)*gradients="mean"'):
        wrap(model)
    assert looks() == before
    model(torch.ones(2, 3)).sum().backward()


@on_ranks(2)
def test_what_is_not_sharded_may_be() -> None:
    fully_shard(nn.Sequential(nn.Linear(2, 2)))


@on_ranks(2)
@cells("wrap", [Block, BMTrainModelWrapper])
def test_what_torch_has_sharded_is_refused(wrap: Callable[[nn.Module], nn.Module]) -> None:
    layer = nn.Linear(4, 4)
    fully_shard(layer)
    with pytest.raises(ConfigError, match=r"of shape \(4, 4\) is a DTensor, .* fully_shard"):
        wrap(layer)


@on_ranks(2)
@cells("clip", [clip_grad_norm_, nn.utils.clip_grad_norm_])
def test_torchs_clipping_is_refused_with_the_way_out(clip: Any) -> None:
    model, ordinary = in_plain(), nn.Linear(2, 2)
    model(torch.ones(2, 3)).sum().backward()
    for parameters in (model.parameters(), list(model.parameters())):
        with pytest.raises(
            ConfigError,
            match=(
                r"Call bmt\.optim\.OptimManager\(\)\.clip_grad_norm\(model\.parameters\(\),"
                r" max_norm\)"
            ),
        ):
            clip(parameters, 1.0)
    ordinary(torch.ones(1, 2)).sum().backward()
    clip(ordinary.parameters(), 0.1)
    if find_spec("bmt_optim") is not None:
        from bmt_optim import OptimManager

        assert OptimManager().clip_grad_norm(model.parameters(), 0.1) > 0.1


@on_ranks(1, 2)
@cells("level", [3, 0])
def test_torchs_norm_of_gradients_is_refused_where_ranks_have_parts(level: int) -> None:
    block, ordinary = Block(nn.Linear(4, 4), zero_level=level), nn.Linear(2, 2)
    block(torch.ones(2, 4)).sum().backward()
    ordinary(torch.ones(1, 2)).sum().backward()
    has_parts = level == 3 and world_size() > 1
    for tensors in ([p.grad for p in block.parameters()], list(block.parameters())):
        with (
            pytest.raises(ConfigError, match=r"this rank's parts .*\.clip_grad_norm\(")
            if has_parts
            else nullcontext()
        ):
            assert nn.utils.get_total_norm(tensors) > 0
    assert nn.utils.get_total_norm([p.grad for p in ordinary.parameters()]) > 0


@on_ranks(1, 2)
@cells("level", [3, 0])
def test_a_grad_scaler_of_torch_is_refused_where_ranks_have_parts(level: int) -> None:
    block = Block(nn.Linear(4, 4), zero_level=level)
    optimizer, scaler = (
        torch.optim.SGD(block.parameters(), lr=0.0),
        torch.amp.GradScaler("cpu", init_scale=2.0),
    )
    scaler.scale(block(torch.ones(2, 4)).sum()).backward()
    has_parts = level == 3 and world_size() > 1
    for call in (scaler.unscale_, scaler.step):
        with (
            pytest.raises(
                ConfigError, match=r"Let OptimManager\(loss_scale=\.\.\.\) scale the loss"
            )
            if has_parts
            else nullcontext()
        ):
            call(optimizer)


WAYS = [
    ("module", r"write model in place of model\.module"),
    ("no_sync", r"with bmt\.no_sync\(model\):"),
    ("set_requires_gradient_sync", r"with bmt\.no_sync\(model\):"),
    ("made_up", "^'Root' object has no attribute 'made_up'$"),
]


@on_ranks(2)
@cells(("name", "way"), WAYS)
def test_attributes_of_other_wrappers_say_what_to_write(name: str, way: str) -> None:
    model = wrapped_root()
    assert not hasattr(model, name)
    with pytest.raises(AttributeError, match=way) as caught:
        getattr(model, name)
    assert str(caught.value).startswith(f"'Root' object has no attribute '{name}'")


def test_python_suggests_nothing_else_for_attributes_of_other_wrappers(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(AttributeError) as caught:
        _ = DistributedModule().module
    sys.__excepthook__(caught.type, caught.value, None)
    # Python would add: Did you mean: 'modules'?
    assert capsys.readouterr().err.endswith("write model in place of model.module.\n")
