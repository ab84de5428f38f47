"""``Block``: what it takes, gives and stays, apart from the mathematics."""

from __future__ import annotations

import copy
import dataclasses
import io
from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import _foreach_supported_types
from zero_models import Layer, full_gradient

from bmt_core.errors import ConfigError, NotInitializedError
from bmt_core.modules.block_use import Scheduled
from bmt_core.modules.distributed_module import DistributedModule
from bmt_core.params.parameter import DistributedParameter
from bmt_core.run import runtime
from bmt_testing import run_ranks
from bmt_zero import Block, CheckpointBlock, gathered_memory

Pair = namedtuple("Pair", "left right")


@dataclasses.dataclass
class Packed:
    hidden: torch.Tensor
    note: str = "kept"


class Record(OrderedDict[str, Any]):
    """A dict with attributes, as model libraries return it."""


class Greedy(nn.Module):
    """Takes every form of argument, and has one named like an option of torch's checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(
        self, x: torch.Tensor, scale: float = 1.0, *rest: Any, shift: Any = None, use_reentrant: str = "no", **more: Any
    ) -> Any:
        y = self.linear(x) * scale
        for item in rest:
            y = y + item["inner"][0]
        if shift is not None:
            y = y + shift.hidden
        return y, use_reentrant, sorted(more), Packed(y * 2), Record(out=y * 3), Pair([y], {"deep": (y * 4,)}), None


def arguments() -> tuple[Any, ...]:
    """Call the raw module and the block with everything, compare results and gradients."""
    seen = []
    for use_checkpoint in (False, True):
        torch.manual_seed(0)
        raw = Greedy()
        block = Block(copy.deepcopy(raw), use_checkpoint=use_checkpoint)
        results = []
        for module in (raw, block):
            x = torch.arange(8.0).view(2, 4).requires_grad_()
            inner = torch.ones(4, requires_grad=True)
            shift = Packed(torch.full((4,), 2.0, requires_grad=True))
            out = module(
                x, 0.5, {"inner": [inner]}, {"inner": (inner,)}, shift=shift, use_reentrant="yes", mask=1, zero=0
            )
            y, text, more, packed, record, pair, nothing = out
            assert type(packed) is Packed and packed.note == "kept"
            assert type(record) is Record and type(pair) is Pair and nothing is None
            (
                y.sum() + packed.hidden.sum() + record["out"].sum() + pair.left[0].sum() + pair.right["deep"][0].sum()
            ).backward()
            results.append((y.detach(), text, more, x.grad, inner.grad, shift.hidden.grad))
        for one, other in zip(*results, strict=True):
            if isinstance(one, torch.Tensor):
                torch.testing.assert_close(one, other)
            else:
                assert one == other
        seen.append(full_gradient(block.linear.weight))
    return seen[0].shape, torch.equal(*seen)


def test_every_argument_and_result_form_passes_through() -> None:
    assert run_ranks(arguments, 2) == [(torch.Size([4, 4]), True)] * 2


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3))
        self.own = nn.Parameter(torch.randn(2, 3))
        self.label = "raw"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.first(x) + self.own.sum(0)
        return y

    def parameter_shape(self) -> torch.Size:
        return self.own.shape


def transparent() -> dict[str, Any]:
    torch.manual_seed(1)
    raw = Nested()
    names = (
        [name for name, _ in raw.named_modules()],
        [name for name, _ in raw.named_parameters()],
        list(raw.state_dict()),
    )
    values = {key: value.clone() for key, value in raw.state_dict().items()}
    block = Block(raw, zero_level=3)
    assert isinstance(block, Block) and isinstance(block, Nested) and CheckpointBlock is Block
    after = (
        [name for name, _ in block.named_modules()],
        [name for name, _ in block.named_parameters()],
        list(block.state_dict()),
    )
    assert names == after
    for key, value in block.state_dict().items():
        torch.testing.assert_close(value, values[key])
    block.label = "set"
    block.eval()
    visited: list[type] = []
    block.apply(lambda module: visited.append(type(module)))
    text = repr(block)
    shapes = {name: p.dim() for name, p in block.named_parameters()}
    return {
        "label": raw.label,
        "training": [raw.training, raw.first[1].training],
        "visited": len(visited),
        "repr": text.startswith("Block[Nested]("),
        "name": block._get_name(),  # transformers compares it with names of classes
        "flat": set(shapes.values()),
        "module": block._module is raw,
    }


def test_block_is_transparent_to_names_attributes_and_modes() -> None:
    for result in run_ranks(transparent, 2):
        assert result == {
            "label": "set",
            "training": [False, False],
            "visited": 4,
            "repr": True,
            "name": "Nested",
            "flat": {1},
            "module": True,
        }


class Own(nn.Linear):
    def init_parameters(self, value: float) -> None:
        with torch.no_grad():
            self.weight.fill_(value)


def initialized_by_block() -> list[Any]:
    inner = DistributedModule()
    inner.weight = DistributedParameter(torch.zeros(3, 2), init_method=torch.nn.init.ones_, group="some")
    block = Block(inner)
    block.init_parameters()
    own = Block(Own(2, 3))
    own.init_parameters(4.0)
    labels = [(label, len(parameters)) for label, parameters in block.grouped_parameters()]
    assert isinstance(block, Scheduled)
    own.gradient_checkpointing = False  # Hugging Face's switch
    assert not own._use_checkpoint and block._use_checkpoint and not block.gradient_checkpointing
    return [block.state_dict()["weight"].tolist(), labels, own.state_dict()["weight"].unique().tolist()]


def test_a_block_has_bmtrains_methods_unless_the_inner_module_has_its_own() -> None:
    assert run_ranks(initialized_by_block, 2) == [[[[1, 1]] * 3, [("some", 1)], [4]]] * 2


def print_on_one_rank() -> str:
    block = Block(Nested())
    return repr(block) + str(next(block.parameters())) if runtime.rank() == 0 else ""


def test_printing_on_one_rank_alone_does_not_hang() -> None:
    text, nothing = run_ranks(print_on_one_rank, 2, timeout=30)
    assert "DistributedParameter(shape=(2, 3)" in text and nothing == ""


def load_whole_tensors(dtype: torch.dtype) -> bool:
    torch.manual_seed(runtime.world_size())
    block = Block(Nested()).to(dtype)
    torch.manual_seed(99)
    wanted = Nested().to(dtype).state_dict()
    before = {key: value.clone() for key, value in wanted.items()}
    block.load_state_dict(wanted)
    for key, value in block.state_dict().items():
        torch.testing.assert_close(value, before[key])
        torch.testing.assert_close(wanted[key], before[key])  # the user's dict is left alone
    with pytest.raises(RuntimeError, match=r"own: the checkpoint has shape \(3, 2\), the model \(2, 3\)"):
        block.load_state_dict({**wanted, "own": torch.zeros(3, 2, dtype=dtype)})
    y = block(torch.ones(4, 5, dtype=dtype))
    return y.dtype == dtype and {p.dtype for p in block.parameters()} == {dtype}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_state_dict_of_whole_tensors_loads_also_after_a_change_of_dtype(dtype: torch.dtype) -> None:
    assert run_ranks(load_whole_tensors, 2, dtype) == [True, True]


class Fails(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.fail = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(x)
        if self.fail == "forward":
            raise ArithmeticError("as if out of memory")
        if self.fail == "backward":
            y.register_hook(_fail)
        return y


def _fail(grad: torch.Tensor) -> None:
    raise ArithmeticError("as if out of memory")


def survives(where: str, level: int, use_checkpoint: bool) -> tuple[int, bool]:
    torch.manual_seed(0)
    block = Block(Fails(), zero_level=level, use_checkpoint=use_checkpoint)
    x = torch.ones(2, 4, requires_grad=True)
    block.fail = where
    with pytest.raises(ArithmeticError):
        block(x).sum().backward()
    shards = all(isinstance(p, DistributedParameter) and p.dim() == 1 for p in block.parameters())
    block.fail = ""
    block.zero_grad()
    block(x).sum().backward()
    gradient = full_gradient(block.linear.weight)
    assert gradient is not None and torch.equal(gradient, torch.full((4, 4), 4.0))
    return gathered_memory.current if level >= 2 else 0, shards


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("use_checkpoint", [False, True])
@pytest.mark.parametrize("level", [1, 2, 3])
def test_an_exception_leaves_the_block_usable_and_nothing_gathered(
    where: str, level: int, use_checkpoint: bool
) -> None:
    assert run_ranks(survives, 2, where, level, use_checkpoint) == [(0, True)] * 2


class KeepsCache(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.prefix = nn.Parameter(torch.arange(6.0).view(2, 3))

    def forward(self, x: torch.Tensor) -> Any:
        return x + self.prefix.sum(), {"cache": self.prefix[:1], "again": self.prefix}


def outliving(level: int) -> list[Any]:
    block = Block(KeepsCache(), zero_level=level)
    found = []
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            _, kept = block(torch.zeros(1))
            found.append((kept["cache"].tolist(), kept["again"].tolist(), kept["again"].requires_grad))
    return found


@pytest.mark.parametrize("level", [2, 3])
def test_outputs_that_are_views_of_parameters_outlive_the_buffer(level: int) -> None:
    whole = [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    for found in run_ranks(outliving, 2, level):
        assert found == [(whole[:1], whole, False), (whole[:1], whole, True)]


class LowRank(nn.Module):
    """LoRA, as its libraries put it in: a frozen layer inside a new one."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.full((2, base.in_features), 0.1))
        self.b = nn.Parameter(torch.full((base.out_features, 2), 0.2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.base(x) + x @ self.a.t() @ self.b.t()
        return y


def with_adapters(level: int, sharded: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    layer: nn.Module = Layer(6, 9)
    layer.requires_grad_(False)
    if sharded:
        Block(layer, zero_level=level)
    layer.down = LowRank(layer.down)  # type: ignore[arg-type]
    optimizer = torch.optim.SGD([p for p in layer.parameters() if p.requires_grad], lr=0.1)
    x = torch.linspace(-1, 1, 12).view(2, 6).requires_grad_()
    for _ in range(3):
        optimizer.zero_grad()
        layer(x).square().sum().backward()
        optimizer.step()
    state = layer.state_dict()
    return {"state": {key: value.clone() for key, value in state.items()}, "x": x.grad}


@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_adapters_added_after_wrapping_train(level: int) -> None:
    expected = with_adapters(level, sharded=False)
    for result in run_ranks(with_adapters, 1, level, True):
        torch.testing.assert_close(result, expected)
    trained = run_ranks(with_adapters, 2, level, True)
    torch.testing.assert_close(trained[0]["state"], trained[1]["state"])
    changed = trained[0]["state"]["down.a"]
    assert not torch.equal(changed, torch.full_like(changed, 0.1))


def copies() -> dict[str, Any]:
    torch.manual_seed(0)
    block = Block(Layer(6, 9), zero_level=2, use_checkpoint=False)
    buffer = io.BytesIO()
    torch.save(block, buffer)
    buffer.seek(0)
    made = [copy.deepcopy(block), torch.load(buffer, weights_only=False)]
    x = torch.linspace(-1, 1, 12).view(2, 6)
    expected = block(x)
    result: dict[str, Any] = {}
    for twin in made:
        assert (
            isinstance(twin, Block) and isinstance(twin, Layer) and twin._zero_level == 2 and not twin._use_checkpoint
        )
        assert all(isinstance(p, DistributedParameter) for p in twin.parameters())
        assert twin.up.weight is twin.gate.weight
        torch.testing.assert_close(twin(x), expected)
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.zero_()
        torch.testing.assert_close(block(x), expected)  # the original is untouched
        torch.testing.assert_close(twin(x), x)
        twin(x).sum().backward()
    return result


def test_copies_and_pickles_are_independent_working_blocks() -> None:
    run_ranks(copies, 2)


def optimizer_first(level: int) -> dict[str, Any]:
    torch.manual_seed(0)
    layer = Layer(6, 9)
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.1)
    if level >= 0:
        Block(layer, zero_level=level)
    x = torch.linspace(-1, 1, 12).view(2, 6) / runtime.world_size() ** 0.5
    for _ in range(3):
        optimizer.zero_grad()
        layer(x).sum().backward()
        optimizer.step()
    return {key: value.clone() for key, value in layer.state_dict().items()}


@pytest.mark.parametrize("level", [0, 1, 3])
def test_an_optimizer_built_before_wrapping_trains_the_shards(level: int) -> None:
    expected = optimizer_first(-1)
    for state in run_ranks(optimizer_first, 1, level):
        torch.testing.assert_close(state, expected)


def levels_changed() -> list[Any]:
    torch.manual_seed(0)
    block = Block(Layer(6, 9), zero_level=3)
    optimizer = torch.optim.SGD(block.parameters(), lr=0.1, momentum=0.9)
    resident = []
    for level in (3, 2, 1, 3):
        block._zero_level = level
        optimizer.zero_grad()
        block(torch.linspace(-1, 1, 12).view(2, 6)).sum().backward()
        optimizer.step()
        resident.append(gathered_memory.current > 0)
    with pytest.raises(ConfigError, match="zero_level cannot change from 3 to 0"):
        block._zero_level = 0
    return [{key: value.clone() for key, value in block.state_dict().items()}, resident]


def test_the_level_may_change_between_steps() -> None:
    torch.manual_seed(0)
    layer = Layer(6, 9)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    for _ in range(4):
        optimizer.zero_grad()
        (2 * layer(torch.linspace(-1, 1, 12).view(2, 6)).sum()).backward()
        optimizer.step()
    for state, resident in run_ranks(levels_changed, 2):
        torch.testing.assert_close(state, dict(layer.state_dict()))
        assert resident == [False, False, True, False]


def stepped_before_backward(level: int) -> str:
    block = Block(Layer(6, 9), zero_level=level)
    optimizer = torch.optim.SGD(block.parameters(), lr=0.1)
    x = torch.ones(2, 6)
    block(x).sum().backward()
    loss = block(x).sum()
    optimizer.step()
    try:
        loss.backward()
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_stepping_between_forward_and_backward_is_an_error(level: int) -> None:
    for message in run_ranks(stepped_before_backward, 2, level):
        assert "changed between its forward and its backward" in message


class Drops(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(x * self.weight, 0.5, self.training)


def dropout(use_checkpoint: bool) -> tuple[list[float], list[float], float]:
    block = Block(Drops(), use_checkpoint=use_checkpoint)
    x = torch.ones(64, requires_grad=True)
    first = block(x)
    shared = torch.rand(())  # the user's own draws stay alike on all ranks
    first.sum().backward()
    assert x.grad is not None
    return first.tolist(), x.grad.tolist(), float(shared)


@pytest.mark.parametrize("use_checkpoint", [False, True])
def test_dropout_differs_between_data_ranks_and_not_in_recomputation(use_checkpoint: bool) -> None:
    (mask0, grad0, shared0), (mask1, grad1, shared1) = run_ranks(dropout, 2, use_checkpoint)
    assert mask0 == grad0 and mask1 == grad1
    assert mask0 != mask1
    assert shared0 == shared1


def peak_gathered(level: int, use_checkpoint: bool, blocks: int) -> tuple[int, int, int]:
    model = nn.Sequential(
        *[Block(nn.Linear(64, 64), zero_level=level, use_checkpoint=use_checkpoint) for _ in range(blocks)]
    )
    one = max(group.flat.full_bytes for group in model[0]._bmt_block.state.groups)  # type: ignore[union-attr]
    gathered_memory.reset_peak()
    seen = []
    for module in model:
        module.register_forward_pre_hook(lambda *_: seen.append(_storage_bytes(model)))  # type: ignore[arg-type]
        module.register_full_backward_hook(lambda *_: seen.append(_storage_bytes(model)))  # type: ignore[arg-type]
    for _ in range(2):
        model(torch.ones(2, 64, requires_grad=True)).sum().backward()
    assert max(seen) <= gathered_memory.peak
    return gathered_memory.peak // one, max(seen) // one, gathered_memory.current


def _storage_bytes(model: nn.Module) -> int:
    groups = [group for block in model for group in block._bmt_block.state.groups]  # type: ignore[union-attr]
    return sum(group.buffer.tensor.untyped_storage().nbytes() for group in groups)


@pytest.mark.parametrize("use_checkpoint", [False, True])
def test_level_3_never_holds_more_than_two_gathered_blocks(use_checkpoint: bool) -> None:
    for counted, measured, left in run_ranks(peak_gathered, 2, 3, use_checkpoint, 6):
        assert 1 <= measured <= counted <= 2
        assert left == 0


def test_level_2_holds_all_until_their_backward() -> None:
    for counted, measured, left in run_ranks(peak_gathered, 2, 2, False, 6):
        assert counted == measured == 6
        assert left == 0


def two_owners() -> str:
    shared = nn.Linear(4, 4)
    first = Block(nn.Sequential(shared))
    with pytest.raises(ConfigError, match="'weight' is shared with another Block") as caught:
        Block(nn.Sequential(nn.ReLU(), shared))
    assert first is not None
    return str(caught.value)


def misuse() -> None:
    with pytest.raises(TypeError, match=r"made of an nn\.Module, not of int"):
        Block(3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="is a Block already"):
        Block(Block(nn.Linear(2, 2)))
    with pytest.raises(ConfigError, match=r"zero_level must be one of \(0, 1, 2, 3\), not 4"):
        Block(nn.Linear(2, 2), zero_level=4)
    with pytest.raises(ConfigError, match="mode must be 'BLOCK' or 'PIPE', not 'pipe'"):
        Block(nn.Linear(2, 2), mode="pipe")  # type: ignore[arg-type]
    with pytest.raises(RuntimeError):
        Block(nn.Linear(2, 2))(torch.ones(1, 3))


def test_a_parameter_in_two_blocks_is_refused() -> None:
    assert len(set(run_ranks(two_owners, 2))) == 1


def test_misuse_is_named() -> None:
    run_ranks(misuse, 2)


def test_a_block_before_init_says_what_to_call() -> None:
    with pytest.raises(NotInitializedError, match=r"Call init_distributed\(\) first"):
        Block(nn.Linear(2, 2))


def paths_of_torch_optimizers() -> tuple[bool, set[str]]:
    block = Block(nn.Linear(4, 4))
    parameters = list(block.parameters())
    # What torch asks before it chooses: on a GPU the answer decides between one kernel and one per parameter.
    supported = all(type(p) in _foreach_supported_types for p in parameters)
    called: set[str] = set()

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            called.add(func.__name__)
            return func(*args, **(kwargs or {}))

    block(torch.ones(2, 4)).sum().backward()
    optimizer = torch.optim.SGD(parameters, lr=0.1, foreach=True)
    with Watch():
        optimizer.step()
    return supported, {name for name in called if name.startswith("_foreach")}


def test_torch_optimizers_take_their_foreach_path() -> None:
    assert run_ranks(paths_of_torch_optimizers, 2) == [(True, {"_foreach_add_"})] * 2
