"""What people do in plain torch works with sharded parameters, or is one clear error."""

from __future__ import annotations

import copy
import io
import itertools
import sys
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.init import xavier_uniform_  # by name, before a run has started
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from bmt_core import ConfigError, DistributedModule, DistributedParameter
from bmt_core.run.runtime import rank, world_size
from bmt_testing import run_ranks
from bmt_zero import Block, BMTrainModelWrapper

needs_numpy = pytest.mark.skipif(find_spec("numpy") is None, reason="numpy is not installed")


class Root(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(3, 3)])
        self.head = nn.Linear(3, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x)
        out: torch.Tensor = self.head(x)
        return out


def wrapped() -> Any:
    return BMTrainModelWrapper(Root())


def error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except ConfigError as error:
        return str(error)
    return ""


def random_fills() -> list[str]:
    """What is said when parts are filled, and that what may be filled is."""
    model, texts = wrapped(), []
    parts = [model.layers[0].weight, dict(model.named_parameters())["head.weight"]]
    for p in parts:
        fills: list[Callable[[Any], Any]] = [nn.init.normal_, nn.init.uniform_, nn.init.trunc_normal_]
        for fill in [*fills, lambda t: t.data.normal_(0, 0.02), lambda t: nn.init.normal_(t.data), *_METHODS]:
            before = p.detach().clone()
            with torch.no_grad():
                texts.append(error_of(lambda fill=fill, p=p: fill(p)))
            assert texts[-1] == "" or torch.equal(p.detach(), before)
        nn.init.constant_(p, 2.0)
        p.data.mul_(2)
        assert p.detach().eq(4.0).all()
        p.detach().normal_()  # what cannot be known, and the way for parts that each rank draws for itself
        kept = [copy.deepcopy(p.data), nn.Parameter(p.data).detach(), p.data + 0, p.data.numpy()]
        torch.save(p.data, file := io.BytesIO())
        file.seek(0)
        assert all(torch.equal(torch.as_tensor(k), p.detach()) for k in [*kept, torch.load(file, weights_only=True)])
        assert type(kept[0]) is type(kept[2]) is torch.Tensor
    level_0 = Block(nn.Linear(3, 3), zero_level=0)
    nn.init.normal_(level_0.weight)
    with torch.device("meta"):
        unfilled = Root()
    BMTrainModelWrapper(unfilled, init=lambda module: [p.data.normal_() for p in module.parameters(recurse=False)])
    return texts


_METHODS: list[Callable[[Any], Any]] = [
    lambda t: t.bernoulli_(),
    lambda t: t.cauchy_(),
    lambda t: t.exponential_(),
    lambda t: t.geometric_(0.5),
    lambda t: t.log_normal_(),
    lambda t: t.random_(),
]


@needs_numpy
def test_random_fills_of_parts_point_to_init_parameters() -> None:
    for texts in run_ranks(random_fills, 2):
        assert len(texts) == 22 and all("init_parameters(model)" in text for text in texts), texts
    (alone,) = run_ranks(random_fills, 1)
    assert set(alone) == {""}


def rules_of_shape() -> tuple[list[str], list[str]]:
    """What is said of a part of a matrix, and what torch says of a vector's part, as it does in plain torch."""
    model, whole = wrapped(), nn.Linear(3, 3)
    part, bias = (dict(model.named_parameters())[f"head.{name}"] for name in ("weight", "bias"))
    before = part.detach().clone()
    rules: list[Callable[[Any], Any]] = [xavier_uniform_, nn.init.xavier_normal_, nn.init.kaiming_uniform_]
    rules += [nn.init.kaiming_normal_, nn.init.orthogonal_, nn.init.eye_, lambda t: nn.init.sparse_(t, 0.5)]
    texts = [error_of(lambda rule=rule: rule(part)) for rule in rules]
    if world_size() > 1:
        texts += [error_of(lambda rule=rule: rule(part.data)) for rule in rules]
    assert torch.equal(part.detach(), before)
    of_vectors = []
    for rule in rules:
        rule(whole.weight)
        with pytest.raises(ValueError) as raised:
            rule(bias)
        of_vectors.append(str(raised.value))
    return texts, of_vectors


@pytest.mark.parametrize("ranks", [1, 2])
def test_rules_that_go_by_a_parameter_s_shape_point_to_init_parameters(ranks: int) -> None:
    for texts, of_vectors in run_ranks(rules_of_shape, ranks):
        assert len(texts) == 7 * ranks and all("init_parameters(model)" in text for text in texts), texts
        assert all("of shape (5, 3)" in text for text in texts[:7])
        assert all("dimensions" in text and "init_parameters" not in text for text in of_vectors), of_vectors


class Writes(nn.Module):
    """Its forward writes to its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.weight.clamp_(max=0.5)
        return x * self.weight


class WritesWithGradients(Writes):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.weight.mul_(0.5)
        return x * self.weight


class OwnWrites(DistributedModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight = DistributedParameter(torch.ones(3))

    forward = Writes.forward


def copies() -> tuple[list[str], list[str]]:
    """What is said of writes to gathered copies of a trained model, outside of calls and in forward."""
    model = wrapped()
    head = model.head
    with torch.no_grad():
        head.weight[1] = 2.0  # takes effect before the first forward
    model(torch.ones(2, 3)).sum().backward()
    value = dict(model.named_parameters())["head.weight"].gather().detach().clone()
    writes: list[Callable[[], Any]] = [
        lambda: nn.init.zeros_(head.weight),
        lambda: nn.init.xavier_uniform_(head.weight),
        lambda: head.weight.data.normal_(),
        lambda: head.weight.data[0].zero_(),
        lambda: head.weight.detach().mul_(2),
        lambda: torch.add(value, value, out=head.weight.data),
        lambda: nn.functional.relu(head.weight.data, inplace=True),
        lambda: torch._foreach_zero_([head.weight.data]),
        lambda: head.weight.data.__setitem__(0, 1.0),
        lambda: setattr(head.weight, "data", value),
        lambda: head.weight.requires_grad_(False),
        lambda: setattr(head.weight, "requires_grad", False),
        lambda: [part.zero_() for part in head.weight.data.split(2)],
    ]
    texts = [error_of(write) for write in writes]
    assert torch.equal(head.weight, value) and value[1].eq(2.0).all()
    # Reading is as with any tensor.
    read = head.weight
    (grad,) = torch.autograd.grad((read.t().sum(0) * 2).sum(), [read])
    assert grad.eq(2).all() and type(read + 1) is type(read.sum()) is torch.Tensor and read.shape == (5, 3)
    mine = torch.zeros(5, 3).copy_(read.detach())
    assert torch.equal(copy.deepcopy(mine.add_(read.detach())), 2 * value) and read.detach().numpy().shape == (5, 3)
    torch.save(read, file := io.BytesIO())
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=True), value)
    with torch.inference_mode():
        assert torch.equal(head.weight, value)
    texts_of_forward = [error_of(lambda: OwnWrites()(torch.ones(2, 3)))]
    with torch.no_grad():  # with gradients torch refuses to read the weight after the write
        for block in (Block(Writes(), True, 3), Block(Writes(), False, 1)):
            texts_of_forward.append(error_of(lambda block=block: block(torch.ones(2, 3))))
    return texts, texts_of_forward


@needs_numpy
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_write_to_a_gathered_copy_of_a_trained_model_raises(ranks: int) -> None:
    for texts, texts_of_forward in run_ranks(copies, ranks):
        assert len(texts) == 13 and all("gathered copy" in text for text in texts), texts
        wanted = [text for text in texts_of_forward if "wrote to" in text]
        # The buffer of a group of one rank is what the rank keeps, and the write takes effect.
        assert len(wanted) == (3 if ranks == 2 else 1), texts_of_forward


def writes_with_gradients() -> None:
    for level in (0, 1, 3):
        block = Block(WritesWithGradients(), use_checkpoint=False, zero_level=level)
        with pytest.raises(RuntimeError, match="is a view"):
            block(torch.ones(2, 3))


@pytest.mark.parametrize("ranks", [1, 2])
def test_torch_refuses_writes_that_autograd_would_record(ranks: int) -> None:
    run_ranks(writes_with_gradients, ranks)


def fully_shard_list(module: nn.Module) -> Any:
    return fully_shard([module])


def other_wrappers() -> tuple[list[str], list[str], list[str]]:
    plain_root = nn.Sequential(wrapped(), nn.Linear(5, 5))
    for model in (wrapped(), plain_root):
        model(torch.ones(2, 3)).sum().backward()
    data_parallel = [error_of(lambda m=m: DistributedDataParallel(m)) for m in (wrapped(), plain_root)]
    fully_sharded: list[str] = []
    models: list[Callable[[], Any]] = [wrapped, lambda: nn.Sequential(wrapped()), lambda: wrapped().layers[0]]
    for make, refused in itertools.product(
        models, (fully_shard, fully_shard_list, replicate, FullyShardedDataParallel)
    ):
        model = make()
        looked = {name: (type(module), dict(module._parameters)) for name, module in model.named_modules()}
        fully_sharded.append(error_of(lambda refused=refused, model=model: refused(model)))
        assert looked == {name: (type(module), module._parameters) for name, module in model.named_modules()}
        model(torch.ones(2, 3)).sum().backward()
    clipping = [
        error_of(call)
        for call in (
            lambda: clip_grad_norm_(plain_root.parameters(), 1.0),
            lambda: nn.utils.clip_grad_norm_(list(plain_root.parameters()), 1.0),
        )
    ]
    ordinary = nn.Linear(2, 2)
    DistributedDataParallel(ordinary)(torch.ones(1, 2)).sum().backward()
    clip_grad_norm_(ordinary.parameters(), 0.1)
    fully_shard(nn.Sequential(nn.Linear(2, 2)))
    if find_spec("bmt_optim") is not None:
        from bmt_optim import OptimManager

        assert OptimManager().clip_grad_norm(plain_root.parameters(), 0.1) > 0.1  # the way out
    assert world_size() == 2
    return data_parallel, fully_sharded, clipping


def test_what_takes_parts_for_whole_parameters_is_refused_and_changes_nothing() -> None:
    names = ["fully_shard"] * 2 + ["replicate", "FullyShardedDataParallel"]
    for data_parallel, fully_sharded, clipping in run_ranks(other_wrappers, 2):
        assert all("DistributedDataParallel would" in text and "OptimManager" in text for text in data_parallel)
        for name, text in zip(names * 3, fully_sharded, strict=True):
            assert text.startswith(f"{name} would shard") and 'gradients="mean"' in text
        assert all(
            "Call bmt.optim.OptimManager().clip_grad_norm(model.parameters(), max_norm)" in text for text in clipping
        )


def scaled_by_torch() -> list[str]:
    """What a GradScaler raises for sharded parameters, and nothing for replicated ones."""
    found = []
    for level in (3, 0):
        block = Block(nn.Linear(4, 4), zero_level=level)
        optimizer, scaler = torch.optim.SGD(block.parameters(), lr=0.0), torch.amp.GradScaler("cpu", init_scale=2.0)
        scaler.scale(block(torch.ones(2, 4)).sum()).backward()
        found += [error_of(lambda call=call, o=optimizer: call(o)) for call in (scaler.unscale_, scaler.step)]
    return found


def test_a_grad_scaler_of_torch_is_refused_where_ranks_have_parts() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for *refused, unscaled, stepped in run_ranks(scaled_by_torch, 2):
            assert all("Let OptimManager(loss_scale=...) scale the loss" in text for text in refused)
            assert (unscaled, stepped) == ("", "")
    assert run_ranks(scaled_by_torch, 1) == [[""] * 4]


class Listing(nn.Linear):
    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:  # type: ignore[override]
        return [super().forward(x), x]


def lists() -> tuple[list[str], list[type]]:
    blocks = [Block(Listing(3, 3)), Block(Listing(3, 3))]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        kinds = [type(block(torch.ones(2, 3))) for block in blocks]
    return [str(warning.message) for warning in caught], kinds


def test_a_list_that_a_block_returns_stays_a_list_which_is_said_once() -> None:
    (said, kinds), (unsaid, others) = run_ranks(lists, 2)
    assert kinds == others == [list, list] and unsaid == []
    assert len(said) == 1 and "BMTrain's Block returned a tuple" in said[0]


def watched_on_one_rank(level: int, watches: bool) -> list[float]:
    torch.manual_seed(0)
    blocks = [Block(nn.Linear(4, 4), zero_level=level) for _ in range(3)]
    if watches and rank() == 0:
        blocks[0].weight.register_hook(lambda gradient: None)
        blocks[1].weight.register_post_accumulate_grad_hook(lambda parameter: None)
    for _ in range(2):
        x = torch.ones(2, 4)
        for block in blocks:
            x = block(x)
        x.sum().backward()
    return [block.weight.gather_like(block.weight.grad).sum().item() for block in blocks]


@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_one_rank_alone_may_watch_gradients(level: int) -> None:
    assert run_ranks(watched_on_one_rank, 2, level, True) == run_ranks(watched_on_one_rank, 2, level, False)


def attributes_of_other_wrappers() -> list[str]:
    model, texts = wrapped(), []
    for name in ("module", "no_sync", "set_requires_gradient_sync", "made_up"):
        assert not hasattr(model, name)
        with pytest.raises(AttributeError, match=f"'Root' object has no attribute '{name}'") as caught:
            getattr(model, name)
        texts.append(str(caught.value))
    return texts


def test_attributes_of_other_wrappers_say_what_to_write() -> None:
    for module, no_sync, fsdp, made_up in run_ranks(attributes_of_other_wrappers, 2):
        assert "write model in place of model.module" in module
        assert "with bmt.no_sync(model):" in no_sync and "with bmt.no_sync(model):" in fsdp
        assert made_up == "'Root' object has no attribute 'made_up'"


def test_python_suggests_nothing_else_for_attributes_of_other_wrappers(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(AttributeError) as caught:
        _ = DistributedModule().module
    sys.__excepthook__(caught.type, caught.value, None)
    # Python would add: Did you mean: 'modules'?
    assert capsys.readouterr().err.endswith("write model in place of model.module.\n")
