"""Each option of the linear function and layers, compared with the dense product: output and
every gradient.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch
from torch.nn.functional import linear
from tp_models import drawn, on_tp_ranks, own_columns, own_rows, tp

from bmt_core.errors import BmtError, ConfigError
from bmt_core.run.collectives import all_reduce
from bmt_tp import (
    ColumnParallelLinear,
    OpParallelLinear,
    ReduceType,
    RowParallelLinear,
    VPEmbedding,
    overlapped_products,
    parallel_linear,
)
from bmt_tp.overlapped_products import FEW_ROWS
from bmt_tp.tensor_group import tensor_group
from cells import cells
from pairwise import pairwise

IN, OUT = 8, 12
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 4e-2}
KINDS = [
    ((12,), torch.float64),
    ((4, 1), torch.bfloat16),  # one sequence
    ((12, 3), torch.float32),
    ((4, 3, 2), torch.float64),
]
TAKES = [(True, True), (False, True), (False, False)]
"""Whether rows have their input gathered, and whether it is split."""


def dense(
    shape: tuple[int, ...], bias: bool, dtype: torch.dtype
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The input, weight and bias with their gradients, and the gradient of the output that led
    to them.
    """
    tensors = [drawn(*shape, IN, seed=1), drawn(OUT, IN, seed=2), drawn(OUT, seed=3)]
    tensors = [tensor.to(dtype).double().requires_grad_() for tensor in tensors]
    output = linear(tensors[0], tensors[1], tensors[2] if bias else None)
    grad = drawn(*output.shape, seed=4).to(dtype)
    output.backward(grad.double())
    return [*tensors, output.detach()], grad


def same(found: torch.Tensor | None, expected: torch.Tensor | None, dtype: torch.dtype) -> None:
    assert found is not None and expected is not None
    tolerance = TOLERANCE[dtype] * max(1.0, float(expected.abs().max()))
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=tolerance)


@contextmanager
def in_pieces(chunks: int) -> Iterator[int]:
    """Yield the number of pieces per rank. One piece is of few rows, which are multiplied at once;
    0 is one piece of many rows.
    """
    with patch.object(overlapped_products, "FEW_ROWS", FEW_ROWS if chunks else 0):
        overlapped_products._pieces_of.cache_clear()
        yield max(chunks, 1)
    overlapped_products._pieces_of.cache_clear()


@on_tp_ranks(1, 4, timeout=120)
@cells(
    ("shape", "dtype", "bias", "gather_input", "gather_output", "chunks"),
    [(*kind, *rest) for kind, *rest in pairwise(KINDS, *3 * [(True, False)], (0, 1, 2))],
)
def test_output_and_gradients_of_columns_equal_the_dense_product(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    bias: bool,
    gather_input: bool,
    gather_output: bool,
    chunks: int,
) -> None:
    (input, weight, of_bias, output), grad = dense(shape, bias, dtype)
    own_input = (
        (own_rows(input.detach()) if gather_input else input.detach()).to(dtype).requires_grad_()
    )
    own_weight = own_rows(weight.detach()).to(dtype).requires_grad_()
    own_bias = own_rows(of_bias.detach()).to(dtype).requires_grad_() if bias else None
    with in_pieces(chunks) as pieces:
        found = OpParallelLinear.apply(
            own_input, own_weight, own_bias, gather_input, gather_output, False, None, pieces
        )
        found.backward(grad if gather_output else own_columns(grad))
    same(found, output if gather_output else own_columns(output), dtype)
    assert input.grad is not None and weight.grad is not None
    same(own_input.grad, own_rows(input.grad) if gather_input else input.grad, dtype)
    same(own_weight.grad, own_rows(weight.grad), dtype)
    if own_bias is not None:
        assert of_bias.grad is not None
        same(own_bias.grad, own_rows(of_bias.grad), dtype)


@on_tp_ranks(1, 2, 4, timeout=120)
@cells(
    ("shape", "dtype", "bias", "takes", "reduce_type", "chunks"),
    [
        (*kind, *rest)
        for kind, *rest in pairwise(KINDS, (True, False), TAKES, ReduceType, (0, 1, 2))
    ],
)
def test_output_and_gradients_of_rows_equal_the_dense_product(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    bias: bool,
    takes: tuple[bool, bool],
    reduce_type: ReduceType,
    chunks: int,
) -> None:
    gather_input, split_input = takes
    (input, weight, of_bias, output), grad = dense(shape, bias, dtype)
    has_rows, scattered = gather_input, reduce_type is ReduceType.REDUCE_SCATTER
    given = input.detach() if split_input else own_columns(input.detach())
    own_input = (own_rows(given) if has_rows else given).to(dtype).requires_grad_()
    own_weight = own_columns(weight.detach()).to(dtype).requires_grad_()
    own_bias = of_bias.detach().to(dtype).requires_grad_() if bias else None
    with in_pieces(chunks) as pieces:
        found = parallel_linear(
            own_input,
            own_weight,
            own_bias,
            gather_input=gather_input,
            split_input=split_input,
            reduce_output_type=reduce_type,
            chunks=pieces,
        )
        found.backward(own_rows(grad) if scattered else grad)
    same(found, own_rows(output) if scattered else output, dtype)
    assert input.grad is not None and weight.grad is not None
    of_input = input.grad if split_input else own_columns(input.grad)
    same(own_input.grad, own_rows(of_input) if has_rows else of_input, dtype)
    same(own_weight.grad, own_columns(weight.grad), dtype)
    if own_bias is not None:
        assert own_bias.grad is not None
        same(all_reduce(own_bias.grad, comm=tensor_group()), of_bias.grad, dtype)


@on_tp_ranks(2)
def test_any_number_of_rows_and_chunks() -> None:
    """Rows that are no multiple of the chunks, one row, none; an input that is not contiguous."""
    for rows, chunks in itertools.product((0, 1, 3, 5), (1, 2, 7)):
        whole = drawn(IN, 2 * rows, seed=rows).t()
        weight = drawn(OUT, IN, seed=9)
        input = own_rows(whole) if rows else whole
        found = parallel_linear(input, own_rows(weight), gather_input=True, chunks=chunks)
        torch.testing.assert_close(found, whole @ own_rows(weight).t())
        found = parallel_linear(
            own_columns(whole),
            own_columns(weight),
            reduce_output_type=ReduceType.REDUCE_SCATTER,
            chunks=chunks,
        )
        torch.testing.assert_close(found, (own_rows(whole) if rows else whole) @ weight.t())


@on_tp_ranks(2)
def test_a_batch_of_none_has_an_empty_output_and_gradient() -> None:
    """Rows of no vectors: a batch of none, sequence first."""
    for column in (True, False):
        weight = own_rows(drawn(OUT, IN)) if column else own_columns(drawn(OUT, IN))
        for option in (True, False):
            x = torch.zeros(4, 0, weight.shape[1], dtype=torch.float64, requires_grad=True)
            kind = (
                None if column else ReduceType.REDUCE_SCATTER if option else ReduceType.ALL_REDUCE
            )
            found = parallel_linear(
                x, weight, gather_input=column and option, reduce_output_type=kind
            )
            assert found.shape == (4 if not option else 8 if column else 2, 0, weight.shape[0])
            found.sum().backward()
            assert x.grad is not None and x.grad.shape == x.shape


@on_tp_ranks(2)
def test_second_derivatives_are_refused_where_a_term_would_be_missing() -> None:
    x = own_rows(drawn(4, IN)).requires_grad_()
    weight = own_rows(drawn(OUT, IN)).requires_grad_()
    with pytest.raises(BmtError, match="no second derivatives"):
        torch.autograd.grad(
            parallel_linear(x, weight, gather_input=True).sum(), x, create_graph=True
        )
    torch.autograd.grad(parallel_linear(x, weight, gather_input=True).sum(), x)


def scattered_row(x: torch.Tensor) -> torch.Tensor:
    return parallel_linear(x, torch.zeros(OUT, IN), reduce_output_type=ReduceType.REDUCE_SCATTER)


def with_options(*options: object) -> Callable[[torch.Tensor], object]:
    return lambda x: OpParallelLinear.apply(x, torch.zeros(OUT, IN), None, *options)  # type: ignore[arg-type]


REFUSED: list[tuple[type[Exception], str, Callable[[torch.Tensor], object]]] = [
    (
        ValueError,
        r"input \(rows, ..., 5\) for this rank's weight of shape \(12, 5\), with tp_size=2",
        lambda x: parallel_linear(x, torch.zeros(OUT, 5), gather_input=True),
    ),
    (
        ValueError,
        r"3 rows, which cannot be scattered evenly over 2 ranks\. Pad them to 4",
        scattered_row,
    ),
    (ConfigError, "at least 1", lambda x: parallel_linear(x, torch.zeros(OUT, IN), chunks=0)),
    (ConfigError, "split_input needs reduce_output_type", with_options(False, False, True, None)),
    (
        ConfigError,
        "gather_output and reduce_output_type exclude each",
        with_options(False, True, False, 1),
    ),
    (
        ConfigError,
        "gather_input with reduce_output_type needs split_input",
        with_options(True, False, False, 2),
    ),
    (
        ConfigError,
        (
            r"^out_features is 13, which tp_size=2 does not divide\. Choose a multiple of 2, or"
            r" another tp_size\.$"
        ),
        lambda x: ColumnParallelLinear(IN, 13),
    ),
    (
        ConfigError,
        "in_features is 9, which tp_size=2 does not divide",
        lambda x: RowParallelLinear(9, OUT),
    ),
    (ConfigError, "vocab_size is 7, which tp_size=2 does not divide", lambda x: VPEmbedding(7, IN)),
    (
        ConfigError,
        r"sections \(-4, 16\) must be sizes of at least 1",
        lambda x: ColumnParallelLinear(IN, OUT, sections=(-4, 16)),
    ),
    (
        ConfigError,
        r"sections \(4, 4\) do not add up to out_features=12",
        lambda x: ColumnParallelLinear(IN, OUT, sections=(4, 4)),
    ),
    (
        ConfigError,
        "A section of 12 output features is 5, which tp_size=2 does not divide",
        lambda x: ColumnParallelLinear(IN, OUT, sections=(5, 7)),
    ),
]


@on_tp_ranks(2)
def test_what_does_not_fit_is_refused_with_the_numbers() -> None:
    x = torch.zeros(3, IN)
    for error, message, call in REFUSED:
        with pytest.raises(error, match=message):
            call(x)
    for wrong_dtype in (x.long(), x.double()):
        with pytest.raises(
            ValueError,
            match=r"one dtype; the input has torch.(int|float)64, the weight torch.float32",
        ):
            parallel_linear(wrong_dtype, torch.ones(OUT, IN), gather_input=True)
        # And nothing of the refused call arrives in the next one.
        rows = torch.full((2, IN), float(tp()[0]))
        assert parallel_linear(rows, torch.ones(1, IN), gather_input=True).flatten().tolist() == [
            0,
            0,
            IN,
            IN,
        ]


@on_tp_ranks(2)
def test_unequal_numbers_of_rows_are_refused_on_all_ranks() -> None:
    rows = 4 + 2 * tp()[0]
    message = r"different shapes .*: \(4, 3, 8\) on rank 0, \(6, 3, 8\) on rank 1.* multiple of 2"
    for call in (with_options(True, False, False, None), with_options(False, False, False, 2)):
        with pytest.raises(ValueError, match=message):
            call(torch.zeros(rows, 3, IN))


@on_tp_ranks(2)
def test_sections_are_cut_each_by_itself_and_joined_again() -> None:
    torch.manual_seed(0)
    layer = ColumnParallelLinear(
        IN, 12, dtype=torch.float64, sections=(4, 8), gather_output=True, async_gather_chunks=None
    )
    weight, bias = drawn(12, IN, seed=1), drawn(12, seed=2)
    layer.load_state_dict({"weight": weight, "bias": bias})
    x = drawn(4, IN, seed=3)
    torch.testing.assert_close(layer(own_rows(x)), linear(x, weight, bias))
    torch.testing.assert_close(layer.state_dict()["weight"], weight)
    index, size = tp()
    own = torch.cat([part.chunk(size)[index] for part in weight.split([4, 8])])
    torch.testing.assert_close(layer.weight, own)


@on_tp_ranks(2)
def test_autocast_decides_the_dtype() -> None:
    x, weight = (own_rows(drawn(rows, IN)).float().requires_grad_() for rows in (4, OUT))
    with torch.autocast("cpu", torch.bfloat16):
        found = parallel_linear(x, weight, gather_input=True)
    assert found.dtype == torch.bfloat16
    found.sum().backward()
    assert x.grad is not None and x.grad.dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert (
            parallel_linear(x.double(), weight.double(), gather_input=True).dtype == torch.float64
        )
