"""Adam against ``torch.optim.Adam`` in every bit, in pieces and on threads, and what it refuses.
What it computes is tested by test_kernel_rules.py.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from bmt_core.ops import read_master, reference, split_master
from bmt_kernels import CpuKernels, CudaKernels
from bmt_kernels.provider import CompiledKernels

FORMS = ["plain", "master_float16", "master_bfloat16", "remainder"]
PARAM = {
    "plain": torch.float32,
    "master_float16": torch.float16,
    "master_bfloat16": torch.bfloat16,
    "remainder": torch.bfloat16,
}
GRADS = [torch.float32, torch.float16, torch.bfloat16]
SIZES = [0, 1, 3, 7, 16, 31, 33, 1000, 4097, 40003]
USUAL: dict[str, Any] = {
    "step": 3,
    "lr": 0.01,
    "beta1": 0.9,
    "beta2": 0.95,
    "eps": 1e-8,
    "weight_decay": 0.1,
    "decoupled": False,
}
Columns = list[list[Any]]


def make(
    form: str,
    sizes: list[int],
    grad: torch.dtype,
    device: torch.device,
    *,
    offset: int = 0,
    seed: int = 0,
) -> Columns:
    """Columns for ``adam_step``; each tensor begins ``offset`` elements behind an
    aligned address.
    """
    generator = torch.Generator().manual_seed(seed)

    def place(tensor: torch.Tensor) -> torch.Tensor:
        room = torch.empty(tensor.numel() + offset, dtype=tensor.dtype, device=device)
        room[offset:] = tensor.to(device)
        return room[offset:]

    columns: Columns = [[], [], [], [], []]
    for size in sizes:
        weight, grads, mean, square = (torch.randn(size, generator=generator) for _ in range(4))
        if form == "remainder":
            param, master = split_master(weight)
        else:
            param, master = weight.to(PARAM[form]), (None if form == "plain" else weight)
        row = [param, grads.to(grad), mean, square.abs(), master]
        for column, tensor in zip(columns, row, strict=True):
            column.append(None if tensor is None else place(tensor))
    return columns


def clone(columns: Columns) -> Columns:
    return [[None if t is None else t.clone() for t in column] for column in columns]


def state(columns: Columns) -> list[torch.Tensor]:
    return [t for i in (0, 2, 3, 4) for t in columns[i] if t is not None]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    """Equal in every bit."""
    return all(
        torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        for a, b in zip(one, other, strict=True)
    )


def optimizers(device: torch.device) -> list[Callable[..., torch.optim.Optimizer]]:
    options = {"lr": 0.01, "foreach": device.type == "cuda"}
    return [
        lambda params: torch.optim.Adam(params, **options),
        lambda params: torch.optim.Adam(params, weight_decay=0.1, **options),
        lambda params: torch.optim.AdamW(params, weight_decay=0.1, **options),
        lambda params: torch.optim.Adam(params, betas=(0.3, 0.0), eps=1e-3, **options),
    ]


@pytest.mark.parametrize("kind", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("which", range(4))
@pytest.mark.parametrize("offset", [0, 1])
def test_float32_equals_torch_in_every_bit(kind: str, which: int, offset: int) -> None:
    provider = CpuKernels() if kind == "cpu" else CudaKernels()
    device = torch.device(kind, 0) if kind == "cuda" else torch.device(kind)
    params, grads, means, squares, masters = make(
        "plain", SIZES[1:], torch.float32, device, offset=offset
    )
    theirs = [torch.nn.Parameter(p.clone()) for p in params]
    optimizer = optimizers(device)[which](theirs)
    group = optimizer.param_groups[0]
    for tensor in (*means, *squares):
        tensor.zero_()
    for step in range(1, 6):
        for i, p in enumerate(theirs):
            grads[i].copy_(
                torch.randn(p.shape, generator=torch.Generator().manual_seed(step * 100 + i))
            )
            p.grad = grads[i].clone()
        optimizer.step()
        provider.adam_step(
            params,
            grads,
            means,
            squares,
            masters,
            step=step,
            lr=group["lr"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            decoupled=isinstance(optimizer, torch.optim.AdamW),
        )
        assert same(means, [optimizer.state[p]["exp_avg"] for p in theirs])
        assert same(squares, [optimizer.state[p]["exp_avg_sq"] for p in theirs])
        assert same(params, [p.detach() for p in theirs])


@pytest.mark.parametrize("form", FORMS)
def test_a_step_in_pieces_is_the_same_step(
    kernels: CompiledKernels, device: torch.device, form: str
) -> None:
    """Lanes, the rest beside them, and other places in memory give the same bits."""
    columns = make(form, [1013], torch.bfloat16, device)
    pieces: Columns = [[], [], [], [], []]
    for piece, column in zip(pieces, clone(columns), strict=True):
        for start, end in itertools.pairwise([0, 1, 2, 5, 100, 131, 1013]):
            piece.append(None if column[0] is None else column[0][start:end])
    kernels.adam_step(*columns, **USUAL)
    kernels.adam_step(*pieces, **USUAL)
    joined = [torch.cat(pieces[i]) for i in (0, 2, 3, 4) if pieces[i][0] is not None]
    assert same(state(columns), joined)


@pytest.mark.parametrize("form", FORMS)
def test_a_large_parameter_gets_the_bits_that_its_pieces_get(
    kernels: CompiledKernels, device: torch.device, form: str
) -> None:
    """Large parameters with a master are written past the cache of a CPU, in whole lines, if they
    begin with one.
    """
    size = 2**20 + 37
    columns = make(form, [size], torch.bfloat16, device)
    pieces: Columns = [[], [], [], [], []]
    for piece, column in zip(pieces, clone(columns), strict=True):
        for start, end in itertools.pairwise([*range(0, size, 100_003), size]):
            piece.append(None if column[0] is None else column[0][start:end])
    for hold in (True, False):
        kernels.adam_step(*columns, **USUAL, hold=hold)
        kernels.adam_step(*pieces, **USUAL, hold=hold)
        assert same(
            state(columns), [torch.cat(pieces[i]) for i in (0, 2, 3, 4) if pieces[i][0] is not None]
        )


def test_avx2_and_avx512_give_the_same_bits() -> None:
    provider = CpuKernels()
    binary: Any = provider.binary
    if "avx512" not in binary.instruction_sets():
        pytest.skip("this processor has no AVX-512")
    before, results = binary.instruction_set(), []
    for name in ("avx2", "avx512"):
        binary.use_instruction_set(name)
        columns = make("remainder", SIZES, torch.float16, torch.device("cpu"))
        provider.adam_step(*columns, **USUAL)
        results.append(state(columns))
    binary.use_instruction_set(before)
    assert same(*results)


def test_remainder_of_what_is_not_finite(kernels: CompiledKernels, device: torch.device) -> None:
    columns = make("remainder", [40], torch.float32, device)
    columns[0][0][0], columns[4][0][0] = math.inf, 0
    columns[0][0][1], columns[4][0][1] = -math.inf, 0
    columns[1][0][2::3] = math.nan
    kernels.adam_step(*columns, **USUAL)
    param, remainder = columns[0][0], columns[4][0]
    is_nan = param.isnan()
    assert is_nan[:2].all(), "inf plus weight_decay * inf over inf"
    assert is_nan[2::3].all() and not is_nan[3::3].any()
    assert param.view(torch.int16)[is_nan].eq(0x7FC0).all() and remainder[is_nan].eq(0).all()
    columns = make("remainder", [40], torch.float32, device)
    columns[0][0][:], columns[4][0][:] = 3e38, 0
    kernels.adam_step(*columns, **{**USUAL, "lr": -1e39, "weight_decay": 0.0, "step": 100})
    assert set(columns[0][0].abs().tolist()) == {math.inf} and columns[4][0].eq(0).all()


def with_first(**first: Callable[[Columns], Any]) -> Callable[[Columns], None]:
    """Put another tensor in the first entry of columns."""
    names = ("param", "grad", "exp_avg", "exp_avg_sq", "master")

    def spoil(columns: Columns) -> None:
        new = {name: make_new(columns) for name, make_new in first.items()}
        for name, tensor in new.items():
            columns[names.index(name)][0] = tensor

    return spoil


BAD = {
    "of torch.int64, a master of None": with_first(
        param=lambda c: c[0][0].long(), master=lambda c: None
    ),
    "of torch.int16": with_first(param=lambda c: c[0][0].half(), master=lambda c: c[4][0].short()),
    r"adam_step: exp_avgs\[0\] and exp_avg_sqs\[0\] share memory": with_first(
        exp_avg_sq=lambda c: c[2][0]
    ),
    r"params\[0\] and params\[1\] share memory": lambda c: c[0].__setitem__(1, c[0][0][1:]),
    r"(grads|exp_avgs)\[0\] and (grads|exp_avgs)\[0\] share memory": with_first(
        grad=lambda c: c[2][0]
    ),
}


def test_bad_rows_and_numbers_are_refused_and_nothing_is_written(
    kernels: CompiledKernels, device: torch.device
) -> None:
    columns = make("master_bfloat16", [6, 5], torch.float32, device)
    before = state(clone(columns))
    for message, spoil in BAD.items():
        spoiled = [list(column) for column in columns]
        spoil(spoiled)
        with pytest.raises((ValueError, TypeError), match=message):
            kernels.adam_step(*spoiled, **USUAL)
    numbers: dict[str, dict[str, torch.Tensor]] = {
        "clip must have one element, not 2": {"clip": torch.ones(2, device=device)},
        "clip must be of dtype torch.float32, not torch.float64": {
            "clip": torch.ones(1, dtype=torch.float64, device=device)
        },
        "scale is on meta, and must be on": {"scale": torch.ones(1, device="meta")},
    }
    for message, options in numbers.items():
        with pytest.raises((ValueError, TypeError), match=message):
            kernels.adam_step(*columns, **USUAL, **options)
    assert same(state(columns), before)


def test_tensors_of_another_device_are_refused(
    kernels: CompiledKernels, device: torch.device
) -> None:
    with pytest.raises(
        ValueError, match=f"params\\[0\\] is on meta, and these kernels are for {device.type}"
    ):
        kernels.adam_step(*make("plain", [6], torch.float32, torch.device("meta")), **USUAL)
    columns = make("plain", [6], torch.float32, device)
    columns[1][0] = columns[1][0].to("meta")
    with pytest.raises(ValueError, match=r"grads\[0\] is on meta, and must be on"):
        kernels.adam_step(*columns, **USUAL)


def test_numbers_of_threads_do_not_matter() -> None:
    results = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        columns = make("remainder", [100_000, 3, 70_000], torch.bfloat16, torch.device("cpu"))
        CpuKernels().adam_step(*columns, **USUAL)
        results.append(state(columns))
    assert same(results[0], results[1]) and same(results[0], results[2])


@pytest.mark.gpu
def test_runs_in_a_cuda_graph_and_on_the_current_stream() -> None:
    provider, device = CudaKernels(), torch.device("cuda", 0)
    captured, eager = (make("master_bfloat16", SIZES, torch.bfloat16, device) for _ in range(2))
    provider.adam_step(*make("master_bfloat16", SIZES, torch.bfloat16, device), **USUAL)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        provider.adam_step(*captured, **USUAL)
    graph.replay()
    graph.replay()
    for _ in range(2):
        provider.adam_step(*eager, **USUAL)
    assert same(state(captured), state(eager))


@pytest.mark.gpu
def test_more_elements_than_32_bits_count() -> None:
    size, device = 2**31 + 4099, torch.device("cuda", 0)
    if torch.cuda.mem_get_info(device)[0] < 15 * size:
        pytest.skip("needs 33 GB of free GPU memory")
    param, grad = (torch.ones(size, dtype=torch.bfloat16, device=device) for _ in range(2))
    mean, square = (torch.zeros(size, device=device) for _ in range(2))
    remainder = torch.zeros(size, dtype=torch.int16, device=device)
    CudaKernels().adam_step(
        [param], [grad], [mean], [square], [remainder], **{**USUAL, "step": 1, "weight_decay": 0.0}
    )
    for part in (slice(0, 5), slice(2**31 - 3, 2**31 + 3), slice(size - 5, size)):
        torch.testing.assert_close(
            read_master(param[part], remainder[part]).cpu(), torch.full_like(mean[part], 0.99).cpu()
        )
        torch.testing.assert_close(mean[part].cpu(), torch.full_like(mean[part], 0.1).cpu())


def test_reference_is_used_where_bits_would_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    provider = CpuKernels()
    monkeypatch.setattr(provider, "equals_torch", lambda: False)
    ours, theirs = (make("plain", SIZES, torch.float32, torch.device("cpu")) for _ in range(2))
    provider.adam_step(*ours, **USUAL)
    reference.adam_step(*theirs, **USUAL)
    assert same(state(ours), state(theirs))
