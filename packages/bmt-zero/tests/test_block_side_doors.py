"""Ways into and around a block that its authors did not have in mind first, each compared with plain torch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from zero_models import full_gradient

from bmt_core.errors import BmtError, ConfigError
from bmt_core.run import runtime
from bmt_testing import run_ranks
from bmt_zero import Block, BMTrainModelWrapper, no_sync
from bmt_zero.unsharded_buffer import gathered_memory


def line(weight: float = 1.0) -> nn.Linear:
    layer = nn.Linear(2, 2)
    with torch.no_grad():
        layer.weight.fill_(weight)
        layer.bias.zero_()
    return layer


X = torch.ones(1, 2)


def grads_of(module: nn.Module) -> dict[str, Any]:
    return {name: full_gradient(parameter) for name, parameter in module.named_parameters()}


def accumulate_around(case: str, level: int) -> dict[str, Any]:
    """Two micro-batches, the first held back; every case has gradients that plain torch gives as well."""
    layer: nn.Module = line()
    sharded = level >= 0
    module = Block(layer, zero_level=level) if sharded else layer
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    if case == "hooked":
        for parameter in module.parameters():
            parameter.register_hook(lambda grad: grad * 1.0)

    def forward() -> torch.Tensor:
        out: torch.Tensor = module(X).sum()
        return out + module(2 * X).sum() if case == "twice" else out

    if sharded:
        with no_sync(module):
            forward().backward()
    else:
        forward().backward()
    if case != "skipped":
        forward().backward()
    optimizer.step()
    return {name: value.clone() for name, value in module.state_dict().items()}


@pytest.mark.parametrize("case", ["twice", "skipped", "hooked"])
@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_gradients_held_back_are_never_lost(case: str, level: int) -> None:
    expected = {name: 2 * value - line().state_dict()[name] for name, value in accumulate_around(case, -1).items()}
    for state in run_ranks(accumulate_around, 2, case, level):
        torch.testing.assert_close(state, expected)  # two ranks: twice the step from the first values


def no_sync_around_backward(level: int) -> dict[str, Any]:
    """What the outer checkpoint calls again is called inside of ``no_sync``, what it is an input of was called before."""
    layer: nn.Module = line()
    module = Block(layer, zero_level=level) if level >= 0 else layer
    for number in range(3):
        x = (number + 1) * X.clone().requires_grad_()
        loss = module(checkpoint(module, x, use_reentrant=True)).square().sum()
        with no_sync(module) if level >= 0 and number < 2 else nullcontext():
            loss.backward()
    return {
        name: parameter.grad if level < 0 else full_gradient(parameter) for name, parameter in module.named_parameters()
    }


@pytest.mark.parametrize("level", [0, 1, 3])
def test_a_gradient_held_back_beside_one_that_is_reduced_is_not_lost(level: int) -> None:
    expected = no_sync_around_backward(-1)
    for grads in run_ranks(no_sync_around_backward, 2, level):
        torch.testing.assert_close({name: grad / 2 for name, grad in grads.items()}, expected)  # the sum of two ranks


def chosen_inputs(dtype: torch.dtype, level: int) -> Any:
    block = Block(line().to(dtype), zero_level=level)
    block(X.to(dtype)).sum().backward()
    block(X.to(dtype)).sum().backward(inputs=[block.weight])
    block(X.to(dtype)).sum().backward(inputs=[block.bias])
    return grads_of(block)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("level", [0, 1, 3])
def test_backward_for_some_parameters_leaves_the_others_alone(dtype: torch.dtype, level: int) -> None:
    for grads in run_ranks(chosen_inputs, 2, dtype, level):
        assert grads["weight"].tolist() == [[4.0, 4.0]] * 2 and grads["bias"].tolist() == [4.0, 4.0]


class Sliced(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList([torch.ones(2), torch.ones(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for scale in self.scales[1:]:
            x = x * scale
        return x


def sliced() -> None:
    for module in (Block(Sliced()), BMTrainModelWrapper(Sliced())):
        with pytest.raises(ConfigError, match="index it"):
            module(X)


def test_a_slice_of_a_parameter_list_is_an_error_and_no_new_leaf() -> None:
    run_ranks(sliced, 2)


def replaced() -> None:
    block = Block(nn.Sequential(line()))
    assert block(X).tolist() == [[2.0, 2.0]]
    block[0].bias = None
    assert block(X).tolist() == [[2.0, 2.0]] and block[0].bias is None
    block[0].weight = nn.Parameter(torch.full((2, 2), 3.0))
    assert block(X).tolist() == [[6.0, 6.0]]
    block(X).sum().backward()
    assert full_gradient(block[0].weight) is not None
    with pytest.raises(ConfigError, match="was replaced by a plain tensor"):
        torch.func.functional_call(block, {"0.weight": torch.zeros(2, 2)}, (X,))


def test_parameters_taken_away_or_replaced_are_taken_over_or_refused() -> None:
    run_ranks(replaced, 2)


class Auxiliary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = line(3.0)
        self.aux = torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(x)
        self.aux = (self.linear.weight**2).sum() + y.square().sum()
        return y


def auxiliary(level: int, use_checkpoint: bool) -> Any:
    block = Block(Auxiliary(), zero_level=level, use_checkpoint=use_checkpoint)
    block(X)
    block.aux.backward()
    alone = grads_of(block)
    block.zero_grad()
    (block(X).sum() + block.aux).backward()
    return alone["linear.weight"], grads_of(block)["linear.weight"]


@pytest.mark.parametrize("use_checkpoint", [False, True])
@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_a_loss_that_leaves_by_a_side_door_has_its_gradients(level: int, use_checkpoint: bool) -> None:
    for alone, together in run_ranks(auxiliary, 2, level, use_checkpoint):
        assert alone.tolist() == [[36.0, 36.0]] * 2  # two ranks x (2 w + 2 y)
        assert together.tolist() == [[38.0, 38.0]] * 2


class GradientInside(nn.Module):
    """Uses a gradient in its forward, as energy models do, and its layers before and after that."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.first = line(3.0)
        self.second = line(2.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.first(self.norm(x)))
        energy = torch.tanh(self.second(h))
        of_h, of_weight = torch.autograd.grad(energy.sum(), (h, self.second.weight), retain_graph=True)
        y: torch.Tensor = energy + torch.tanh(self.second(self.first(h))) * of_h * of_weight.sum()
        return y


def gradient_inside(make: Callable[[nn.Module], nn.Module]) -> Any:
    blocks = [make(GradientInside()) for _ in range(2)]
    x = torch.linspace(-1, 2, 6).view(3, 2)
    blocks[1](blocks[0](x)).square().sum().backward()
    return [grads_of(block) for block in blocks], [block.norm.running_mean for block in blocks]


def gradient_inside_block(level: int, use_checkpoint: bool) -> Any:
    return gradient_inside(lambda module: Block(module, zero_level=level, use_checkpoint=use_checkpoint))


@pytest.mark.parametrize("use_checkpoint", [False, True])
@pytest.mark.parametrize("level", [1, 2, 3])
def test_forward_may_ask_for_gradients_of_its_own(level: int, use_checkpoint: bool) -> None:
    expected, means = gradient_inside(lambda module: module)
    for found, found_means in run_ranks(gradient_inside_block, 2, level, use_checkpoint):
        torch.testing.assert_close(found, [{name: 2 * grad for name, grad in grads.items()} for grads in expected])
        torch.testing.assert_close(found_means, means)


class ModifiesSaved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = line()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.sigmoid(self.linear(x))
        y.mul_(2)  # sigmoid saved its result
        return y.exp()


def modified(use_checkpoint: bool) -> None:
    block = Block(ModifiesSaved(), zero_level=3, use_checkpoint=use_checkpoint)
    with pytest.raises((BmtError, RuntimeError), match=r"modified by an in-?place operation"):
        block(X).sum().backward()


@pytest.mark.parametrize("use_checkpoint", [False, True])
def test_modifying_what_backward_needs_is_an_error_as_in_plain_torch(use_checkpoint: bool) -> None:
    run_ranks(modified, 2, use_checkpoint)


def printed_wrapped() -> str:
    model = BMTrainModelWrapper(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))
    return repr(model) if runtime.rank() == 0 else ""


def test_printing_a_wrapped_model_on_one_rank_does_not_hang() -> None:
    text, nothing = run_ranks(printed_wrapped, 2, timeout=30)
    assert "in_features=3, out_features=3, bias=True" in text and nothing == ""


def data_of_empty_parts() -> list[Any]:
    block = Block(nn.Linear(4, 4))
    optimizer = torch.optim.SGD(block.parameters(), lr=0.1, momentum=0.9)
    block(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    block.bias.requires_grad_(False)
    block.weight.data = block.weight.data.clone()
    twin, of_twin = copy.deepcopy((block, optimizer))
    for module, stepping in ((block, optimizer), (twin, of_twin)):
        stepping.zero_grad()
        module(torch.ones(1, 4)).sum().backward()
        stepping.step()
    torch.testing.assert_close(dict(block.state_dict()), dict(twin.state_dict()))
    return [parameter.shape for parameter in block.parameters()]


def test_laying_out_again_moves_no_part_and_all_ranks_agree_to_it() -> None:
    run_ranks(data_of_empty_parts, 4, timeout=30)


class OnRankZeroOnly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = line()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) if runtime.rank() == 0 else x.clone()


def without_part(level: int) -> Any:
    first, second = Block(OnRankZeroOnly(), zero_level=level), Block(line(), zero_level=level)
    second(first(X)).sum().backward()
    return grads_of(first)["linear.weight"]


@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_a_first_block_without_part_on_one_rank_reduces_with_the_others(level: int) -> None:
    for grad in run_ranks(without_part, 2, level, timeout=30):
        assert grad.tolist() == [[2.0, 2.0]] * 2


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([line(), line()])
        self.layers[1].weight = self.layers[0].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[1](self.layers[0](x))  # type: ignore[no-any-return]


def copied_tied() -> None:
    model = BMTrainModelWrapper(Tied())
    twin = copy.deepcopy(model)
    assert twin(X).tolist() == model(X).tolist() == [[4.0, 4.0]]
    late = copy.deepcopy(model)
    with torch.inference_mode():  # its first call, which lays it out
        late(X)
    late(X).sum().backward()
    assert all(parameter.grad is not None for parameter in late.parameters())


def test_copies_keep_ties_across_blocks_and_survive_inference_mode() -> None:
    run_ranks(copied_tied, 2)


def wrapped_with_a_graph_alive() -> None:
    layer = line()
    kept = layer(X).sum()
    block = Block(layer)
    block(X).sum().backward()
    assert kept.grad_fn is not None and grads_of(block)["weight"].tolist() == [[2.0, 2.0]] * 2
    loss = block(X).sum()
    block.requires_grad_(False)
    loss.backward()  # as in plain torch: what was frozen since takes nothing
    assert grads_of(block)["weight"].tolist() == [[2.0, 2.0]] * 2


def test_wrapping_under_a_living_graph_and_freezing_before_backward() -> None:
    run_ranks(wrapped_with_a_graph_alive, 2)


def refused() -> None:
    block, wrapped = Block(line()), BMTrainModelWrapper(line())
    for module in (block, wrapped):
        with pytest.raises(ConfigError, match="assign=True"):
            module.load_state_dict(line().state_dict(), assign=True)


def test_what_cannot_be_done_is_refused() -> None:
    run_ranks(refused, 2)


def second_derivatives(level: int, use_checkpoint: bool) -> None:
    first, second = (Block(line(), zero_level=level, use_checkpoint=use_checkpoint) for _ in range(2))
    frozen = Block(line().requires_grad_(False), zero_level=level, use_checkpoint=use_checkpoint)
    aside = Block(Auxiliary(), zero_level=level, use_checkpoint=use_checkpoint)
    for loss in (
        lambda x: (second(first(x)) * torch.tensor([1.0, 3.0])).sum(),  # the gradients that come in are constants
        lambda x: frozen(x).sum(),
        lambda x: first(x).square().sum(),
        lambda x: aside(x).sum() * 0 + aside.aux,
    ):
        x = X.clone().requires_grad_()
        with pytest.raises(BmtError, match="no second derivatives"):
            torch.autograd.grad(loss(x), x, create_graph=True)
        x = X.clone().requires_grad_()
        torch.autograd.grad(loss(x), x)  # nothing was left behind


@pytest.mark.parametrize("use_checkpoint", [False, True])
@pytest.mark.parametrize("level", [0, 3])
def test_second_derivatives_are_refused_before_they_are_wrong(level: int, use_checkpoint: bool) -> None:
    run_ranks(second_derivatives, 2, level, use_checkpoint)


def prompts() -> tuple[int, bool]:
    block = Block(line().requires_grad_(False), zero_level=3)
    prompt = X.clone().requires_grad_()
    for _ in range(5):
        block(prompt).sum().backward()
    (grad,) = torch.autograd.grad(block(prompt).sum(), prompt)
    assert torch.equal(grad, torch.full((1, 2), 2.0)) and gathered_memory.current == 0
    return len(prompt._backward_hooks or {}), torch.equal(prompt.grad, torch.full((1, 2), 10.0))  # type: ignore[arg-type]


def test_hooks_do_not_pile_up_on_a_leaf_before_a_frozen_block() -> None:
    assert run_ranks(prompts, 2) == [(0, True)] * 2


def sparse_outside() -> list[Any]:
    model = BMTrainModelWrapper(nn.Sequential(nn.Embedding(5, 2, sparse=True)))
    model(torch.tensor([1, 1, 4])).sum().backward()
    return grads_of(model)["0.weight"].sum(1).tolist()


def test_sparse_gradients_outside_of_blocks_are_reduced_dense() -> None:
    assert run_ranks(sparse_outside, 2) == [[0.0, 8.0, 0.0, 0.0, 4.0]] * 2


def input_modified_after_the_block() -> str:
    block = Block(nn.Sequential(nn.Linear(2, 2), nn.Tanh()), use_checkpoint=True)
    x = torch.ones(3, 2)
    out = block(x).sum()
    x.mul_(2)
    try:
        out.backward()
    except BmtError as error:
        return str(error)
    return "no error"


def test_an_input_that_was_modified_is_not_recomputed_from() -> None:
    for message in run_ranks(input_modified_after_the_block, 2):
        assert "An input of a block was modified in place" in message


def limited() -> list[str]:
    found = []
    for wrap, kind in ((Block, nn.Embedding), (BMTrainModelWrapper, nn.EmbeddingBag)):
        model = nn.Sequential(kind(4, 2, max_norm=1.0), nn.Linear(2, 2))
        with pytest.raises(ConfigError) as caught:
            wrap(model)
        assert type(model) is nn.Sequential and type(model[1].weight) is nn.Parameter  # nothing has changed
        found.append(str(caught.value))
    return found


def test_modules_that_write_their_parameters_in_forward_are_refused() -> None:
    ((one, other),) = run_ranks(limited, 1)
    assert "0 is an nn.Embedding with max_norm=1.0, which shortens rows" in one
    assert "0 is an nn.EmbeddingBag with max_norm=1.0" in other and "Set max_norm to None" in other


class Transforming(nn.Module):
    """Calls its layer inside of a transform; ``reads_before`` says whether it does so outside of one before."""

    def __init__(self, layer: nn.Module, reads_before: bool) -> None:
        super().__init__()
        self.layer, self.reads_before = layer, reads_before

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.layer(x) if self.reads_before else x
        return out + torch.func.vmap(self.layer)(x)


def transformed() -> None:
    plain = nn.Sequential(line(0.5), nn.Tanh())
    transforms: list[Callable[[nn.Module], Any]] = [
        lambda module: torch.func.grad(lambda x: module(x).sum())(X),
        lambda module: torch.func.jacrev(module)(X),
        lambda module: torch.func.jvp(module, (X,), (X,)),
        lambda module: torch.func.vmap(module)(X),
        lambda module: Transforming(module, reads_before=False)(X),
    ]
    for wrap in (BMTrainModelWrapper, Block):
        for transform in transforms:
            module = wrap(copy.deepcopy(plain))
            with pytest.raises(ConfigError, match="used inside of a transform"):
                transform(module)
            module(X).sum().backward()  # which crashed
            jacobian = torch.autograd.functional.jacobian
            torch.testing.assert_close(jacobian(module, X), jacobian(plain, X))
    with pytest.raises(ConfigError, match="Linear was used inside of a transform"):
        BMTrainModelWrapper(Transforming(Block(line()), reads_before=True))(X)
    expected, found = (Transforming(line(), reads_before=True) for _ in range(2))
    for model in (expected, BMTrainModelWrapper(found)):
        model(X).square().sum().backward()
    sums = {name: 2 * grad for name, grad in grads_of(expected).items()}  # over two ranks
    torch.testing.assert_close(grads_of(found), sums)


def test_use_in_transforms_of_torch_func_is_refused_and_breaks_nothing() -> None:
    run_ranks(transformed, 2)
