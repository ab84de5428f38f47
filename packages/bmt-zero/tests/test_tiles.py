"""Submodules that compute each token by itself, in tiles: the same training as in plain torch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from zero_models import BATCH, Products, all_weights, full_gradient, grads_of, my_part

from bmt_core.errors import ConfigError
from bmt_params.modules.outermost_call import is_call_under_way
from bmt_testing import on_ranks
from bmt_zero import Block, BMTrainModelWrapper, TransformerBlockList, no_sync
from cells import cells
from pairwise import pairwise

WIDTH, TOKENS = 6, 7


class MLP(nn.Module):
    """Linear layers with and without a bias, one used twice, a tied weight, another parameter."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, 9, bias=False), nn.Linear(WIDTH, 9)
        self.down, self.dropout = nn.Linear(9, WIDTH), nn.Dropout(dropout)
        self.again, self.scale = nn.Linear(9, WIDTH), nn.Parameter(torch.rand(9))
        self.again.weight = self.down.weight
        self.token_wise = True
        self.most = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.most = max(self.most, x.shape[1])
        hidden = self.dropout(F.silu(self.gate(x)) * self.up(x) * self.scale)
        y: torch.Tensor = self.down(hidden) + self.again(hidden.tanh())
        return y + self.down(self.up(y).sin())


class InLoop(MLP):
    """Computes tiles of two tokens itself."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([super(InLoop, self).forward(part) for part in x.split(2, 1)], 1)


class Layer(nn.Module):
    """Mixes tokens before and after the MLP, whose norm and whose last linear layer are tiled, too.
    ``case`` is what is special about it.
    """

    def __init__(self, mlp: nn.Module, case: str = "") -> None:
        super().__init__()
        self.norm, self.mix, self.last = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Identity()
        self.mlp, self.case = mlp, case
        self.norm.token_wise = True  # type: ignore[assignment]
        if case == "more":
            self.last = nn.Linear(WIDTH, WIDTH)
            self.last.token_wise = True  # type: ignore[assignment]
        if case == "frozen":
            mlp.requires_grad_(False)
        if case == "adapters":  # one weight is trained
            mlp.requires_grad_(False)
            mlp.up.weight.requires_grad_(True)
        if case == "only mlp":
            self.norm.requires_grad_(False)
            self.mix.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm(x)
        h = x + (self.mix(normed) - normed.mean(1, keepdim=True)).sin()
        inner: Callable[[torch.Tensor], torch.Tensor] = self.mlp
        if self.case == "nested checkpoint":
            h = h + checkpoint(inner, h, use_reentrant=False)
        if self.case == "reentrant":
            h = h + checkpoint(inner, h, use_reentrant=True)
        y: torch.Tensor = self.last(h + inner(h))
        return y * y.mean(1, keepdim=True).cos() if self.case == "more" else y


CASES = ["", "more", "frozen", "adapters", "only mlp", "nested checkpoint", "reentrant"]


def layers_of(case: str, kind: type[MLP] = MLP, dropout: float = 0.0) -> list[nn.Module]:
    torch.manual_seed(0)
    return [Layer(kind(dropout), case).double() for _ in range(2)]


def data(step: int, width: int = WIDTH) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(BATCH, TOKENS, width, generator=generator, dtype=torch.float64)


def train(
    model: nn.Module, part: Callable[[torch.Tensor], torch.Tensor], micro_batches: int = 1
) -> dict[str, Any]:
    """Gradients of the last of two steps, of inputs too, and the parameters after it."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.01)
    found: dict[str, Any] = {}
    for step in range(2):
        optimizer.zero_grad()
        for micro in range(micro_batches):
            x = part(data(2 * step + micro)).requires_grad_()
            if micro + 1 < micro_batches and isinstance(next(model.children()), Block):
                with no_sync(model):
                    loss = model(x).sin().sum()
                    loss.backward()
            else:
                loss = model(x).sin().sum()
                loss.backward()
        found = {name: full_gradient(p) for name, p in model.named_parameters()}
        optimizer.step()
    assert x.grad is not None
    found |= {f"new {name}": value for name, value in model.state_dict().items()}
    return found | {"input": x.grad}


USES = pairwise(CASES, range(4), [True, False], [1, 2, 3, 6], [1, 2], [1, 2, 4])


@on_ranks(1, 2, 4)
@cells(
    ("case", "level", "recomputes", "tile", "micro_batches"),
    lambda ranks: [cell for *cell, of_ranks in USES if of_ranks == ranks],
)
@all_weights
def test_tiles_train_like_plain_torch(
    case: str, level: int, recomputes: bool, tile: int, micro_batches: int
) -> None:
    expected = train(nn.Sequential(*layers_of(case)), lambda x: x, micro_batches)
    blocks = [Block(layer, recomputes, level, tile=tile) for layer in layers_of(case)]
    found = train(nn.Sequential(*blocks), my_part, micro_batches)
    assert all(block.mlp.most == tile for block in blocks)
    expected["input"] = my_part(expected["input"])
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)


@on_ranks(2)
@cells(("level", "recomputes"), [(3, True), (2, False)])
def test_random_numbers_are_those_of_a_loop_over_tiles(level: int, recomputes: bool) -> None:
    found = []
    for kind, tile in ((InLoop, None), (MLP, 2)):
        layers = layers_of("", kind, dropout=0.4)
        if tile is not None:
            for layer in layers:
                layer.norm.token_wise = False  # type: ignore[assignment, union-attr]
        blocks = [Block(layer, recomputes, level, tile=tile) for layer in layers]
        torch.manual_seed(1)
        found.append((train(nn.Sequential(*blocks), my_part), torch.rand(2)))
    torch.testing.assert_close(found[1], found[0], rtol=1e-11, atol=1e-12)


class Last(nn.Module):
    """Ends with its MLP, like a layer of Llama."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 9), nn.GELU(), nn.Linear(9, WIDTH))
        self.mlp.token_wise = True  # type: ignore[assignment]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x + self.mix(x).sin()
        y: torch.Tensor = h + self.mlp(h)
        return y


@on_ranks(1)
@cells("keep", [None, "products", 10**6])
@all_weights
def test_tiles_are_recomputed_once_and_nothing_is_kept_of_them(keep: Any) -> None:
    block = Block(Last(), keep=keep, tile=3)
    for _ in range(2):  # a budget is planned after the first call
        loss = block(torch.ones(1, TOKENS, WIDTH)).sum()
        with Products() as products:
            loss.backward()
    of_mix = 0 if keep else 1
    assert products.count == of_mix + 3 * 2


@on_ranks(2)
@all_weights
def test_backward_may_come_twice_or_ask_for_some_gradients_only() -> None:
    plain, layer = layers_of("")[:1], layers_of("")[:1]
    block = Block(layer[0], tile=3)
    found = []
    for module in (plain[0], block):
        x = data(0).requires_grad_()
        loss = module(x).sin().sum()
        (of_input,) = torch.autograd.grad(loss, [x], retain_graph=True)
        loss.backward(retain_graph=True)
        loss.backward()
        found.append([of_input, x.grad, full_gradient(module.mlp.down.weight)])  # type: ignore
    found[0][2] = 2 * found[0][2]  # both ranks have the whole batch
    torch.testing.assert_close(found[1], found[0], rtol=1e-11, atol=1e-12)


@on_ranks(2)
def test_without_gradients_and_in_copies_tiles_give_the_same_values() -> None:
    (layer,) = layers_of("")[:1]
    expected = layer(data(0))
    block = copy.deepcopy(Block(layer, tile=2))
    for mode in (torch.no_grad(), torch.inference_mode()):
        block.mlp.most = 0  # type: ignore[union-attr]
        with mode:
            found = block(data(0))
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
        assert block.mlp.most == 2  # type: ignore[union-attr]


class Notes(nn.Linear):
    """Notes what is around its calls."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.token_wise, self.seen = True, set[object]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        self.seen.add((torch.is_autocast_enabled("cpu"), is_call_under_way(), y.dtype))
        return y


@on_ranks(1)
@cells("recomputes", [True, False])
def test_backward_computes_tiles_in_the_modes_of_forward(recomputes: bool) -> None:
    block = Block(nn.Sequential(nn.Linear(WIDTH, WIDTH), Notes()), recomputes, tile=3)
    with torch.autocast("cpu", torch.bfloat16):
        y = block(torch.ones(1, TOKENS, WIDTH))
    y.sum().backward()
    assert block[1].seen == {(True, True, torch.bfloat16)}


class Aside(nn.Module):
    """Keeps a result that the Block does not return."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp, self.aside = MLP(), torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.aside = self.mlp(x)
        return x * self.mlp.scale.sum()


@on_ranks(2)
@cells("recomputes", [True, False])
def test_backward_may_reach_tiles_without_the_outputs_of_the_block(recomputes: bool) -> None:
    torch.manual_seed(0)
    plain = Aside().double()
    found = []
    for module in (plain, Block(copy.deepcopy(plain), recomputes, tile=3)):
        module(data(0))
        module.aside.sin().sum().backward()
        found.append(grads_of(module, times=2 if module is plain else 1))
    torch.testing.assert_close(found[1], found[0], rtol=1e-11, atol=1e-12)


@on_ranks(2)
@cells("kind", ["MLP", "linear"])
@all_weights
def test_a_block_may_be_tiled_itself(kind: str) -> None:
    torch.manual_seed(0)
    plain = (MLP() if kind == "MLP" else nn.Linear(WIDTH, WIDTH)).double()
    plain.token_wise = True  # type: ignore[assignment]
    found = []
    for module in (plain, Block(copy.deepcopy(plain), tile=3)):
        y = module(data(0))
        y.sin().sum().backward()
        found.append((y, grads_of(module, times=2 if module is plain else 1)))
    torch.testing.assert_close(found[1], found[0], rtol=1e-11, atol=1e-12)


@on_ranks(2)
def test_a_wrapped_model_tiles_the_layers_that_declare_it_and_shares_weights() -> None:
    found = []
    for wraps in (False, True):
        layers = layers_of("")
        layers[1].mlp.up.weight = layers[0].mlp.up.weight  # type: ignore[union-attr]
        model = nn.Module()
        model.layers = nn.ModuleList([*layers, nn.Sequential(nn.Linear(WIDTH, WIDTH).double())])
        run = nn.Sequential(*model.layers)
        if wraps:
            BMTrainModelWrapper(model, tile=3)
            assert [layer._bmt_block.state.tile for layer in model.layers] == [3, 3, None]  # type: ignore[union-attr]
        run(my_part(data(0)) if wraps else data(0)).sin().sum().backward()
        found.append({name: full_gradient(p) for name, p in model.named_parameters()})
    torch.testing.assert_close(found[1], found[0], rtol=1e-11, atol=1e-12)


@on_ranks(1)
@cells("autocast", [False, True])
@all_weights
def test_gradients_of_half_types_are_no_worse_than_without_tiles(autocast: bool) -> None:
    def gradient(dtype: torch.dtype, tile: int | None) -> torch.Tensor:
        torch.manual_seed(0)
        layer = Last().bfloat16().to(torch.float32 if autocast else dtype)
        block = Block(layer, tile=tile)
        x = torch.randn(1, 2048, WIDTH).bfloat16().float().to(layer.mix.weight.dtype)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast and dtype != torch.float32):
            loss = (block(x).float() ** 2).sum()
        loss.backward()
        found = full_gradient(block.mlp[0].weight)  # type: ignore[index]
        assert found is not None
        return found.float()

    exact = gradient(torch.float32, None)
    whole, tiled = (
        (gradient(torch.bfloat16, tile) - exact).norm() / exact.norm() for tile in (None, 16)
    )
    assert tiled < 1.1 * whole


class Wrong(nn.Module):
    """An MLP that cannot be computed in tiles."""

    def __init__(self, case: str) -> None:
        super().__init__()
        self.case, self.token_wise, self.inner = case, True, nn.Linear(WIDTH, WIDTH)
        self.register_buffer("calls", torch.zeros(()))
        self.outside = torch.ones(WIDTH, requires_grad=True)
        if case == "own forward":
            self.__dict__["forward"] = self.inner.forward

    def forward(self, x: torch.Tensor, other: object = None) -> Any:
        if self.case == "buffer":
            self.calls += 1
        if self.case == "input":
            x.mul_(2)
        if self.case == "hook":
            self.inner.weight.register_hook(lambda grad: grad)
        if self.case == "outside":
            x = x * self.outside.exp()
        y = self.inner(x)
        return {"tuple": (y, y), "mean": y.mean(1)}.get(self.case, y)


class AroundWrong(nn.Module):
    def __init__(self, case: str) -> None:
        super().__init__()
        self.case, self.mlp = case, Wrong(case)

    def forward(self, x: torch.Tensor) -> Any:
        if self.case == "two arguments":
            return self.mlp(x, x)
        return self.mlp(x.long() if self.case == "integers" else x * 1)


@on_ranks(1)
@cells(
    ("case", "message"),
    [
        ("two arguments", "got .2, 7, 6. of torch.float32 and .2, 7, 6."),
        ("integers", "must get one floating tensor .* got .2, 7, 6. of torch.int64"),
        ("tuple", "must return one tensor .* returned tuple"),
        ("mean", r"must return one tensor .* returned \(2, 6\)"),
        ("buffer", "wrote to its input or a buffer"),
        ("input", "wrote to its input or a buffer"),
        ("hook", "put a hook on a parameter"),
        ("outside", r"reads a tensor of shape \(6,\) that requires a gradient"),
        ("own forward", "has a forward of its own"),
    ],
)
def test_what_tiles_cannot_compute_is_an_error_that_names_the_module(
    case: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=rf"^mlp \(Wrong\) is token_wise.*{message}"):
        block = Block(AroundWrong(case), tile=3)
        block(torch.ones(2, TOKENS, WIDTH)).sum().backward()


@on_ranks(1)
def test_errors_of_the_argument_say_what_to_declare() -> None:
    def plain() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU())

    with pytest.raises(ConfigError, match=r"none in Sequential says so.*mlp.token_wise = True"):
        Block(plain(), tile=3)
    with pytest.raises(ConfigError, match=r"none in Sequential says so"):
        BMTrainModelWrapper(nn.ModuleList([plain(), plain()]), tile=3)
    with pytest.raises(ConfigError, match=r"tile must be a number of tokens, .* and not 0"):
        Block(Last(), tile=0)
    with pytest.raises(ConfigError, match=r"tile=\.\.\. and compile=True"):
        Block(Last(), tile=3, compile=True)
    with pytest.raises(TypeError, match=r"Give it to each Block"):
        TransformerBlockList([Last()], tile=3)  # type: ignore[call-arg]


@pytest.mark.gpu
@on_ranks(1, init={"device": "cuda"})
@pytest.mark.parametrize("recomputes", [True, False])
def test_on_a_gpu_the_memory_of_a_step_falls(recomputes: bool) -> None:
    peaks, gradients = [], []
    for tile in (None, 1024):
        torch.manual_seed(0)
        mlp = nn.Sequential(nn.Linear(256, 4096), nn.GELU(), nn.Linear(4096, 256))
        mlp.token_wise = True  # type: ignore[assignment]
        block = Block(nn.Sequential(nn.LayerNorm(256), mlp).bfloat16(), recomputes, tile=tile)
        for _ in range(2):
            block.zero_grad()
            torch.manual_seed(1)
            x = torch.randn(1, 32_768, 256, device="cuda", dtype=torch.bfloat16)
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            (block(x).float().square().sum() / 32_768).backward()
            peaks.append(torch.cuda.max_memory_allocated() - before)
        found = full_gradient(mlp[0].weight)
        assert found is not None
        gradients.append(found.float())
    assert peaks[3] < peaks[1] / 4  # without tiles, three times 256 MiB inside the MLP
    assert (gradients[1] - gradients[0]).norm() < 0.02 * gradients[0].norm()
