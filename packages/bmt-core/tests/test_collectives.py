"""Collectives for users, and their derivatives against one process in plain torch."""

from __future__ import annotations

import itertools
import math
import os
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

import bmt_core
from bmt_core.comm import all_gather_object, broadcast_object, objects
from bmt_core.comm.lazy_group import LazyGroup
from bmt_core.comm.protocols import CommContext
from bmt_core.comm.torch_backend import TorchBackend, TorchGroup
from bmt_core.errors import ConfigError, NotInitializedError
from bmt_core.run import collectives as distributed
from bmt_core.run.runtime import current
from bmt_testing import gpu_ranks, on_ranks, run_ranks

OPS = ["sum", "avg", "max", "min", "prod"]
SHAPE = (4, 3)
INTERVAL_OF_MONITORS = "TORCH_NCCL_COORD_CHECK_MILSEC"


def input_of(rank: int, *, zeros: bool = False) -> torch.Tensor:
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
    if zeros:
        # One zero among the factors of some elements, and in column 0 two with four ranks.
        x[0, rank % 3] = 0
        x[1, 1] = 0  # in all of them
    return x


def upstream_of(rank: int, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randn(
        shape, generator=torch.Generator().manual_seed(100 + rank), dtype=torch.float64
    )


def reduced(stack: torch.Tensor, op: str) -> torch.Tensor:
    functions: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "sum": lambda t: t.sum(0),
        "avg": lambda t: t.mean(0),
        "max": lambda t: t.amax(0),
        "min": lambda t: t.amin(0),
        "prod": lambda t: t.prod(0),
    }
    return functions[op](stack)


def inputs(world_size: int, *, zeros: bool = False) -> list[torch.Tensor]:
    return [input_of(rank, zeros=zeros).requires_grad_() for rank in range(world_size)]


def own_gradients(output: torch.Tensor, xs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Each rank's derivative of its own loss by its own input, when all ranks have ``output``."""
    return [
        torch.autograd.grad(output, x, upstream_of(rank, tuple(output.shape)), retain_graph=True)[0]
        for rank, x in enumerate(xs)
    ]


def of_all_ranks(name: str, op: str, world_size: int, zeros: bool) -> list[list[torch.Tensor]]:
    """Return each rank's result and gradient, by plain torch in one process."""
    xs, root = inputs(world_size, zeros=zeros), world_size - 1
    if name == "broadcast":
        total = sum(upstream_of(rank, SHAPE) for rank in range(world_size))
        grads = [total if rank == root else torch.zeros_like(xs[0]) for rank in range(world_size)]
        return [[xs[root], grad] for grad in grads]
    stack = torch.stack(xs)
    if name == "reduce_scatter":
        parts = reduced(stack, op).chunk(world_size)
        losses = [(part * upstream_of(r, tuple(part.shape))).sum() for r, part in enumerate(parts)]
        if op not in ("sum", "avg"):  # which have no derivative
            return [[part] for part in parts]
        grads = torch.autograd.grad(sum(losses), xs)
        return [[part, grad] for part, grad in zip(parts, grads, strict=True)]
    output = stack if name == "all_gather" else reduced(stack, op)
    return [[output, grad] for grad in own_gradients(output, xs)]


CELLS = [
    *itertools.product(["all_reduce"], OPS, [False, True]),
    *itertools.product(["reduce_scatter"], OPS, [False]),
    ("all_gather", "", False),
    ("broadcast", "", False),
]


@on_ranks(1, 4)
def test_results_and_derivatives_are_those_of_one_process(world_size: int) -> None:
    rank = bmt_core.rank()
    for name, op, zeros in CELLS:
        if zeros and op in ("max", "min"):
            continue  # equal inputs: see below
        x = input_of(rank, zeros=zeros).requires_grad_()
        argument = {"broadcast": world_size - 1, "all_gather": None}.get(name, op)
        y = getattr(distributed, name)(x, argument)
        expected = of_all_ranks(name, op, world_size, zeros)[rank]
        found = [y.detach()]
        if len(expected) > 1:
            found += torch.autograd.grad(y, x, upstream_of(rank, tuple(y.shape)))
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other.detach(), msg=lambda text: f"{name} {op}: {text}")  # noqa: B023
            is_moved = name == "all_gather" or (name == "broadcast" and one is found[0])
            assert torch.equal(one, other) or not is_moved


def loss_of_rows(rows: torch.Tensor, rank: int) -> torch.Tensor:
    """A loss of a rank's own, in which the rows of all ranks meet."""
    return (rank + 1) * (rows @ rows.mT).logsumexp(-1).sin().mean()


@on_ranks(1, 4)
def test_all_gather_with_summed_gradients_differentiates_the_losses_of_all_ranks(
    world_size: int,
) -> None:
    rank = bmt_core.rank()
    for shape in ((3, 2), (2,), ()):
        values = torch.linspace(-1, 1, world_size * math.prod(shape), dtype=torch.float64)
        whole = values.view(world_size, *shape).requires_grad_()
        x = whole[rank].detach().requires_grad_()
        rows = distributed.all_gather(x, sum_gradients=True)
        assert torch.equal(rows, whole)
        own = loss_of_rows(rows.reshape(-1, 1), rank)
        summed = sum(loss_of_rows(whole.reshape(-1, 1), n) for n in range(world_size))
        for _ in range(2):  # the second time that of a penalty on the gradients
            (grad,) = torch.autograd.grad(own, x, create_graph=True)
            (expected,) = torch.autograd.grad(summed, whole, create_graph=True)
            torch.testing.assert_close(grad, expected[rank])
            own, summed = grad.square().sum(), expected.square().sum()


@on_ranks(2)
def test_each_rank_whose_input_is_the_maximum_gets_the_gradient_and_no_other() -> None:
    grad = torch.tensor([1.0, math.inf])
    for op in ("max", "min"):
        x = torch.ones(2, requires_grad=True)
        (found,) = torch.autograd.grad(distributed.all_reduce(x, op), x, grad)  # type: ignore[arg-type]
        assert torch.equal(found, grad)
    x = torch.full((2,), float(bmt_core.rank()), requires_grad=True)
    (found,) = torch.autograd.grad(distributed.all_reduce(x, "max"), x, grad)
    assert torch.equal(found, grad if bmt_core.rank() else torch.zeros(2))  # and no NaN


@on_ranks(2)
def test_second_derivatives_that_are_not_there_are_errors() -> None:
    for name, *args in (("broadcast", 0), ("reduce_scatter",)):
        x = torch.ones(2, requires_grad=True)
        y = getattr(distributed, name)(x * x, *args)
        (grad,) = torch.autograd.grad(y.pow(2).sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            grad.sum().backward()


def on_any_tensor() -> None:
    rank, size = bmt_core.rank(), bmt_core.world_size()
    base = torch.arange(24.0).view(4, 6) + 100 * rank
    total = (torch.arange(24.0).view(4, 6) * size + 100 * sum(range(size)))[:, 1:5:2]
    view = base[:, 1:5:2]  # strided
    assert torch.equal(distributed.all_reduce(view), total)
    assert torch.equal(distributed.all_reduce(base.t()), distributed.all_reduce(base).t())
    assert torch.equal(distributed.all_gather(view)[rank], view)
    assert torch.equal(distributed.broadcast(view, 0), torch.arange(24.0).view(4, 6)[:, 1:5:2])
    assert torch.equal(distributed.reduce_scatter(view), total.chunk(size)[rank])
    assert torch.equal(base, torch.arange(24.0).view(4, 6) + 100 * rank)  # inputs are left alone
    assert distributed.all_gather(torch.tensor(float(rank))).tolist() == list(range(size))
    assert distributed.all_reduce(torch.tensor(2)).item() == 2 * size
    assert distributed.all_gather(torch.empty(0, 3)).shape == (size, 0, 3)
    assert distributed.all_gather(base[1:2, 2:3].t())[:, 0, 0].tolist() == [
        8 + 100 * r for r in range(size)
    ]
    expanded = torch.ones(1, 3).expand(2, 3)
    assert torch.equal(distributed.all_reduce(expanded), torch.full((2, 3), float(size)))
    for dtype in (torch.int32, torch.int64, torch.uint8):
        product = distributed.all_reduce(torch.tensor([2], dtype=dtype), "prod")
        assert product.dtype == dtype and product.item() == 2**size
    for dtype in (torch.bool, torch.float8_e4m3fn, torch.complex64, torch.bfloat16):
        gathered = distributed.all_gather(torch.ones(3).to(dtype))
        assert gathered.dtype == dtype and gathered.float().real.sum() == 3 * size
    for dtype in (torch.bfloat16, torch.float16):
        assert distributed.all_reduce(torch.ones(3, dtype=dtype), "avg").tolist() == [1, 1, 1]
    conjugate = torch.full((size,), 1 + 2j).conj()
    for x in (conjugate, conjugate.imag):  # only marked as conjugate and as negative
        assert distributed.all_gather(x).tolist() == [x.tolist()] * size
        assert distributed.reduce_scatter(x).tolist() == [x[0].item() * size]


@on_ranks(1, 4)
def test_slices_transposed_empty_and_0_dim_tensors_of_every_dtype() -> None:
    on_any_tensor()


@on_ranks(2)
def test_two_ranks_swap_tensors_or_one_sends() -> None:
    """What an exchange between the ranks of a group of two does on a device, here by gloo."""
    world = bmt_core.current().world
    group = world.connected() if isinstance(world, LazyGroup) else world
    assert isinstance(group, TorchGroup)
    # One that NCCL and gloo know, and one that travels as bytes.
    kinds = [torch.bfloat16, torch.int64]
    for shape in ((3, 2), ()):
        for dtypes in itertools.product([*kinds, None], repeat=2):  # of what each rank sends
            sent, received = dtypes[group.rank], dtypes[1 - group.rank]
            outgoing = None if sent is None else torch.full(shape, group.rank, dtype=sent)
            incoming = None if received is None else torch.empty(shape, dtype=received)
            if outgoing is None and incoming is None:
                continue
            group._swap(outgoing, incoming)
            if incoming is not None:
                assert torch.equal(incoming, torch.full(shape, 1 - group.rank, dtype=received))


@pytest.mark.parametrize("setting", [None, "1"])
def test_calls_of_torch_and_tensors_on_a_gpu_in_a_run_on_the_cpu(setting: str | None) -> None:
    env = {} if setting is None else {"TORCH_GLOO_LAZY_INIT": setting}
    run_ranks(of_torch_beside_those_of_bmt, 4, setting, env=env)


def of_torch_beside_those_of_bmt(setting: str | None) -> None:
    """The program calls torch's own group, which connects when it is used."""
    total = torch.ones(3, dtype=torch.float64)
    dist.all_reduce(total)
    assert total.tolist() == [4.0] * 3
    assert distributed.all_reduce(total).tolist() == [16.0] * 3
    assert os.environ.get("TORCH_GLOO_LAZY_INIT") == setting  # for groups that the program makes
    assert os.environ["GLOO_ENABLE_RANK_AS_SEQUENCE_NUMBER"] == "1"
    with FakeTensorMode():
        on_gpu = torch.ones(3, device="cuda")
    with pytest.raises(ConfigError, match=r"A run on the CPU has no group for .* cuda:0. Move it"):
        current().world.broadcast(on_gpu)


@on_ranks(2)
def test_an_exchange_with_itself_or_with_nobody_is_refused() -> None:
    group, sent = bmt_core.current().world, torch.ones(3)
    for peer in (group.rank, 5, -1):
        with pytest.raises(
            ValueError,
            match=rf"ranks \(0, 1\), and not {group.rank}, .* They are \[{peer}, {peer}\]",
        ):
            group.exchange([(sent, peer)], [(torch.empty_like(sent), peer)])


def sent_to_neighbours() -> None:
    """Ranks exchange in pairs, while the others do something else."""
    group, device = bmt_core.current().world, bmt_core.current().device
    rank = group.rank
    for left, right in ((0, 1), (1, 2), (2, 3), (3, 0)):
        for both in (False, True):
            found = torch.full((5,), -1.0, device=device)
            own = torch.full((5,), float(rank), device=device)
            if rank == left:
                group.exchange([(own, right)], [(found, right)] if both else []).wait()
            elif rank == right:
                group.exchange([(own, left)] if both else [], [(found, left)]).wait()
            expected = left if rank == right else right if both and rank == left else -1
            assert found.tolist() == [expected] * 5


def test_an_exchange_concerns_its_two_ranks_alone() -> None:
    run_ranks(sent_to_neighbours, 4)


@on_ranks(2)
def test_comm_chooses_the_group() -> None:
    group = bmt_core.current().topology.group(())
    x = torch.full((2,), float(bmt_core.rank()))
    for found in (
        distributed.all_reduce(x, comm=group),
        distributed.all_gather(x, group).flatten(),
        distributed.reduce_scatter(x, comm=group),
        distributed.broadcast(x, 0, group),
    ):
        assert torch.equal(found, x)


@on_ranks(2, 4)
def test_activations_travel_with_shape_and_dtype(world_size: int) -> None:
    """Every rank sends to the next and receives from the previous one."""
    rank, world = bmt_core.rank(), bmt_core.current().world

    def kinds(rank: int) -> list[torch.Tensor]:
        return [
            torch.full((2, 3), 1.0 + rank)[:, ::2],
            torch.tensor(5 + rank),
            torch.ones(0, 4),
            torch.ones(1, 2, 1, 3, dtype=torch.bfloat16, requires_grad=True),
            torch.ones(3).to(torch.float8_e5m2),
            torch.tensor([True, False]),
            torch.tensor([1 + 2j]).conj(),
        ]

    previous, following = (rank - 1) % world_size, (rank + 1) % world_size
    for tensor, expected in zip(kinds(rank), kinds(previous), strict=True):
        if rank % 2 == 0:
            distributed.send_activations(tensor, following, world)
        got = distributed.recv_activations(previous, world)
        if rank % 2 == 1:
            distributed.send_activations(tensor, following)
        assert got.dtype == expected.dtype and got.tolist() == expected.tolist()


def reduced_loss(x: torch.Tensor) -> torch.Tensor:
    gathered = distributed.all_gather(x * 2).sum(0)
    scattered = distributed.reduce_scatter(torch.cat([x, x]), "avg")
    total = distributed.all_reduce(gathered) + scattered + distributed.broadcast(x, 1)
    return bmt_core.mean_loss(total.square().sum(), count=x.numel())


@on_ranks(2)
def test_compiled_code_calls_them_with_tensors_of_any_shape() -> None:
    compiled = torch.compile(reduced_loss, backend="eager")
    for length in (3, 4, 6, 7):
        x = (torch.arange(float(length)) + bmt_core.rank()).requires_grad_()
        found, expected = compiled(x), reduced_loss(x)
        assert torch.equal(found, expected)
        gradients = [torch.autograd.grad(loss, x)[0] for loss in (found, expected)]
        assert torch.equal(*gradients)
    rows = torch.compile(bmt_core.gather_result, backend="eager")(torch.ones(bmt_core.rank() + 1))
    assert rows.tolist() == [1.0] * 3


# ---- errors ----


@on_ranks(2, timeout=30)
def test_mistakes_are_clear_errors_before_anything_is_sent() -> None:
    x = torch.ones(3)
    with pytest.raises(
        ValueError, match=r"No reduction is named 'mean'\. Known: sum, avg, max, min, prod"
    ):
        distributed.all_reduce(x, "mean")  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match=r"cuts dim 0 into 2 equal parts, and the tensor has shape \(3,\)"
    ):
        distributed.reduce_scatter(x)
    with pytest.raises(ValueError, match=r"shape \(\)"):
        distributed.reduce_scatter(torch.tensor(1.0))
    with pytest.raises(
        ValueError, match=r"The tensor is on meta, and rank \d runs on cpu\. Move it there"
    ):
        distributed.all_reduce(x.to("meta"))
    with pytest.raises(ValueError, match=r"average of torch\.int64"):
        distributed.all_reduce(torch.ones(2, dtype=torch.int64), "avg")
    with pytest.raises(TypeError, match="comm must be a group"):
        distributed.all_gather(x, "world")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="moves tensors, not list"):
        distributed.all_gather([1.0])  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"Rank 2 is outside of the group, which has 2 rank"):
        distributed.broadcast(x, 2)
    with pytest.raises(TypeError, match=r"cannot send torch\.complex32"):
        distributed.send_activations(torch.ones(2, dtype=torch.complex32), 1 - bmt_core.rank())
    for call in (distributed.all_reduce, distributed.reduce_scatter):
        with pytest.raises(TypeError, match=r"torch\.int16 cannot be reduced on the CPU"):
            call(torch.ones(2, dtype=torch.int16))
    with pytest.raises(ConfigError, match=r"Rank \d is this rank itself\. .* of \(0, 1\)"):
        distributed.send_activations(x, bmt_core.rank())
    with pytest.raises(ConfigError, match=r"Rank \d is this rank itself"):
        distributed.recv_activations(bmt_core.rank())
    y = distributed.reduce_scatter(torch.ones(4, requires_grad=True), "max")
    with pytest.raises(NotImplementedError, match="op='max' has no derivative"):
        y.sum().backward()
    assert distributed.all_reduce(x).tolist() == [2.0] * 3  # and nobody is out of step


CALLS: list[Callable[[torch.Tensor], Any]] = [
    lambda x: distributed.all_gather(x),
    lambda x: distributed.all_reduce(x),
    lambda x: distributed.reduce_scatter(x),
    lambda x: distributed.broadcast(x, 0),
    lambda x: distributed.send_activations(x, 0),
    lambda x: distributed.recv_activations(0),
    lambda x: bmt_core.sum_loss(x),
    lambda x: bmt_core.mean_loss(x, count=3),
    lambda x: bmt_core.gather_result(x),
]


def test_before_init_it_says_to_call_init() -> None:
    for call in CALLS:
        with pytest.raises(NotInitializedError, match=r"init_distributed\(\)"):
            call(torch.ones(2))
    assert issubclass(NotInitializedError, RuntimeError)


# ---- results ----


@on_ranks(1, 4)
def test_sum_loss_is_the_mean_and_differentiable(world_size: int) -> None:
    loss = torch.tensor(float(bmt_core.rank()), requires_grad=True)
    mean = bmt_core.sum_loss(loss)
    mean.backward()
    assert mean == (world_size - 1) / 2 and loss.grad == 1 / world_size


@on_ranks(1, 4)
def test_mean_loss_is_the_mean_over_the_tokens_of_all_ranks(world_size: int) -> None:
    tokens = torch.arange(5.0).repeat(world_size)[bmt_core.rank() ** 2 :][: bmt_core.rank() * 3]
    of_all = bmt_core.gather_result(tokens)  # rank 0 has none
    if world_size > 1:
        for count in (len(tokens), torch.tensor(len(tokens)), float(len(tokens))):
            loss_sum = tokens.sum().requires_grad_()
            mean = bmt_core.mean_loss(loss_sum, count)
            assert mean == of_all.mean() and mean.dtype == torch.float32
            mean.backward()  # type: ignore[no-untyped-call]
            assert loss_sum.grad == 1 / len(of_all)
        assert bmt_core.mean_loss(tokens.sum().bfloat16(), count=len(tokens)) == of_all.mean()
        assert bmt_core.mean_loss(float(tokens.sum()), count=len(tokens)) == of_all.mean()
        both = bmt_core.mean_loss(torch.stack([tokens.sum(), tokens.sum() * 2]).double(), 10)
        torch.testing.assert_close(
            both, torch.tensor([1.0, 2]).double() * of_all.sum() / world_size / 10
        )
    assert bmt_core.mean_loss(torch.zeros(()), count=0).isnan()
    rank = torch.tensor(float(bmt_core.rank()))
    assert bmt_core.mean_loss(rank) == bmt_core.sum_loss(rank) == (world_size - 1) / 2
    with pytest.raises(ValueError, match=r"count must be 0 or more, not -1\."):
        bmt_core.mean_loss(rank, count=-1)
    with pytest.raises(ValueError, match=r"count must be a number or a 0-dim tensor, not \(2,\)"):
        bmt_core.mean_loss(rank, count=torch.ones(2))


@on_ranks(1, 4)
def test_gather_result_concatenates_whatever_ranks_have() -> None:
    rank, size = bmt_core.rank(), bmt_core.world_size()
    assert bmt_core.gather_result(torch.tensor(rank)).tolist() == list(range(size))
    rows = torch.full((2, 3), float(rank), requires_grad=True)
    result = bmt_core.gather_result(rows)
    assert result.shape == (2 * size, 3) and result[::2, 0].tolist() == list(range(size))
    assert not result.requires_grad and result.device.type == "cpu"
    assert bmt_core.gather_result(torch.eye(4)[1:3, ::2]).shape == (2 * size, 2)
    for dtype in (torch.bool, torch.uint8, torch.bfloat16, torch.float8_e4m3fn, torch.complex64):
        assert bmt_core.gather_result(torch.ones(2).to(dtype)).dtype == dtype
    last = bmt_core.gather_result(torch.full((rank, 2), rank))  # rank 0 has none left
    assert last[:, 1].tolist() == [owner for owner in range(size) for _ in range(owner)]


@on_ranks(2, timeout=30)
def test_results_that_do_not_fit_are_an_error_on_every_rank() -> None:
    both = r"\(2, 3\) torch.float32 on rank 0, \(2, 4\) torch.float32 on rank 1"
    with pytest.raises(ValueError, match=both):
        bmt_core.gather_result(torch.zeros(2, 3 + bmt_core.rank()))


# ---- on devices ----


def on_the_device(interval: str | None) -> None:
    with torch.device("cuda"):
        on_any_tensor()
        assert bmt_core.gather_result(torch.ones(2)).is_cuda
    assert not bmt_core.gather_result(torch.ones(2)).is_cuda
    if bmt_core.world_size() > 1:
        assert os.environ.get(INTERVAL_OF_MONITORS) == interval
        if bmt_core.rank() == 0:
            distributed.send_activations(torch.ones(2, 3, device="cuda"), 1)
        elif bmt_core.rank() == 1:
            received = distributed.recv_activations(0)
            assert received.is_cuda and received.tolist() == [[1.0] * 3] * 2


@pytest.mark.parametrize(("asked", "interval"), [(None, "10240"), ("70", "70")])
def test_monitors_of_nccl_get_their_interval_while_torch_makes_its_first_group(
    asked: str | None, interval: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []

    def show_interval(*arguments: object, **options: object) -> None:
        found.append(os.environ.get(INTERVAL_OF_MONITORS))
        raise RuntimeError("1,024 ranks are not there")

    monkeypatch.setattr(dist, "init_process_group", show_interval)
    monkeypatch.setenv(INTERVAL_OF_MONITORS, str(asked))
    if asked is None:
        monkeypatch.delenv(INTERVAL_OF_MONITORS)
    monkeypatch.setenv("GLOO_ENABLE_RANK_AS_SEQUENCE_NUMBER", "1")  # so that the end restores it
    context = CommContext(
        rank=0,
        world_size=1024,
        local_rank=0,
        device=torch.device("cuda"),
        store=dist.HashStore(),
        timeout=30.0,
    )
    with pytest.raises(RuntimeError, match="are not there"):
        TorchBackend(context)
    assert found == [interval] and os.environ.get(INTERVAL_OF_MONITORS) == asked


@pytest.mark.gpu(4)
def test_on_devices_an_exchange_concerns_its_two_ranks_alone() -> None:
    run_ranks(sent_to_neighbours, 4, init={"device": "cuda"})


@pytest.mark.gpu
def test_tensors_of_devices_travel() -> None:
    interval = os.environ.get(INTERVAL_OF_MONITORS)
    run_ranks(on_the_device, min(2, gpu_ranks()), interval, init={"device": "cuda"})


LENGTHS = (0, *range(484, 490), 5000)


def objects_of_all_lengths() -> None:
    """Of one message, of a byte less and more, of many more, and each of these on some
    ranks only.
    """
    world = current().world
    for lengths in itertools.product(LENGTHS, repeat=2):
        expected = [bytes([rank]) * lengths[rank] for rank in range(world.size)]
        assert all_gather_object(expected[world.rank], world) == expected
    for length, source in itertools.product(LENGTHS, range(world.size)):
        assert (
            broadcast_object(bytes([world.rank]) * length, world, source)
            == bytes([source]) * length
        )


def test_objects_of_any_length_arrive_whole() -> None:
    """See the note about short objects in :mod:`bmt_core.comm.objects`."""
    pickled = {len(pickle.dumps(bytes(length))) for length in LENGTHS}
    assert pickled >= {objects._ROOM - 1, objects._ROOM, objects._ROOM + 1}
    run_ranks(objects_of_all_lengths, 2)


@on_ranks(2)
def test_objects_travel_whatever_the_default_device_is() -> None:
    with torch.device("meta"):
        objects_of_all_lengths()
