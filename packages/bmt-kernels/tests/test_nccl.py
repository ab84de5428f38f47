"""The backend ``nccl-native`` where there is no GPU: what it refuses, and how ranks share the id of
a communicator.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from nccl_fakes import compiled, native

from bmt_core.comm.protocols import REDUCE_OPS, Group
from bmt_core.plugins import Registry
from bmt_core.run.runtime import current
from bmt_kernels import plugin
from bmt_kernels.nccl import NcclBackend, NcclError, NcclGroup
from bmt_kernels.nccl.arguments import check_apart, check_same_dtype, check_widening, reduction
from bmt_kernels.nccl.backend import shared_unique_id
from bmt_testing import rank_pool, run_ranks

# Memory that is neither the device's nor the host's, and can be had everywhere.
META = torch.device("meta")


def group_without_nccl() -> NcclGroup:
    """A group whose communicator is nothing: whatever gets through to NCCL is another error."""
    nothing: Any = None
    return NcclGroup((3, 5, 8), 1, nothing, nothing, META)


def floats(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device=META)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda g: g.all_gather(floats(9), floats(4)),
            ValueError,
            r"output has 9 elements, and must have 12: those of input \(4\)",
        ),
        (
            lambda g: g.all_gather(floats(12), torch.empty(4)),
            ValueError,
            "all_gather: input is on cpu, and must be on meta",
        ),
        (
            lambda g: g.all_gather(torch.empty(12), floats(4)),
            ValueError,
            "all_gather: output is on cpu, and must be on meta",
        ),
        (
            lambda g: g.all_gather(floats(12), floats(4, dtype=torch.int32)),
            TypeError,
            r"output is of dtype torch\.float32, and input of torch\.int32",
        ),
        (
            lambda g: g.all_gather(floats(12), floats(4, 2)[:, 0]),
            ValueError,
            (
                r"input must be contiguous, and has shape \(4,\) and strides \(2,\). Call"
                r" .contiguous\(\)"
            ),
        ),
        (
            lambda g: g.reduce_scatter(floats(4), floats(13)),
            ValueError,
            "reduce_scatter: input has 13 elements, and must have 12",
        ),
        (
            lambda g: g.reduce_scatter(floats(4), floats(12), "mean"),
            ValueError,
            "op must be one of sum, avg, .*, not 'mean'",
        ),
        (
            lambda g: g.reduce_scatter(floats(4), floats(12, dtype=torch.bfloat16), "max"),
            ValueError,
            "wider dtype knows sum and avg, not max",
        ),
        (
            lambda g: g.reduce_scatter(
                floats(4, dtype=torch.float16), floats(12, dtype=torch.bfloat16)
            ),
            TypeError,
            r"output is of dtype torch\.float16, and input of torch\.bfloat16",
        ),
        (
            lambda g: g.reduce_scatter(floats(4), floats(12, dtype=torch.float64)),
            TypeError,
            "and the input a narrower float",
        ),
        (
            lambda g: g.all_reduce(floats(4, dtype=torch.int16)),
            TypeError,
            r"all_reduce cannot reduce torch\.int16. NCCL reduces",
        ),
        (lambda g: g.all_reduce(floats(4, dtype=torch.bool), "avg"), TypeError, "have no average"),
        (
            lambda g: g.all_reduce(floats(4, dtype=torch.complex64), "max"),
            TypeError,
            "a sum and an average, no max",
        ),
        (
            lambda g: g.all_reduce(floats(4, 4).t()),
            ValueError,
            "all_reduce: tensor must be contiguous",
        ),
        (
            lambda g: g.broadcast(floats(4), 3),
            ValueError,
            r"root must be an index of the group's ranks \(3, 5, 8\), not 3",
        ),
        (lambda g: g.broadcast(floats(4), -1), ValueError, "not -1"),
        (lambda g: g.send(floats(4), 1), ValueError, "send: dst 1 is this rank itself"),
        (
            lambda g: g.recv(floats(4), 8),
            ValueError,
            "recv: src must be an index of the group's ranks .*, not 8",
        ),
        (
            lambda g: g.exchange([(floats(4), 0)], [(floats(4, 2)[:, 0], 2)]),
            ValueError,
            "recv: tensor must be contiguous",
        ),
    ],
)
def test_bad_arguments_are_refused_before_nccl_is_called(
    call: Callable[[Group], object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        call(group_without_nccl())


def test_nothing_to_move_is_done_without_nccl() -> None:
    group, nothing = group_without_nccl(), floats(0)
    for work in (
        group.all_gather(nothing, nothing),
        group.reduce_scatter(nothing, nothing),
        group.reduce_scatter(nothing, floats(0, dtype=torch.float16)),
        group.all_reduce(nothing),
        group.broadcast(nothing, 2),
        group.exchange([], []),
    ):
        assert callable(work.wait)


def test_input_and_output_share_only_the_slice_of_this_rank() -> None:
    whole = torch.empty(12)
    for start in range(9):
        if start == 4:
            check_apart("all_gather", whole, whole[4:8], 1)
            continue
        with pytest.raises(
            ValueError,
            match=f"share memory, {4 * start} bytes after the beginning .* slice, 16 bytes",
        ):
            check_apart("all_gather", whole, whole[start : start + 4], 1)
    around = torch.empty(20)
    check_apart("all_gather", around[4:16], around[:4], 1)
    check_apart("all_gather", around[4:16], around[16:], 1)
    with pytest.raises(ValueError, match="share memory, -4 bytes"):
        check_apart("all_gather", around[4:16], around[3:7], 1)


def test_every_dtype_that_nccl_reduces_has_the_number_of_its_header() -> None:
    in_order = (
        "int8",
        "uint8",
        "int32",
        "uint32",
        "int64",
        "uint64",
        "float16",
        "float32",
        "float64",
        "bfloat16",
    )
    for number, name in enumerate(in_order):
        tensor = torch.empty(6, dtype=getattr(torch, name))
        # ncclRedOp_t: sum, prod, max, min, avg.
        numbers = [reduction("all_reduce", tensor, op) for op in REDUCE_OPS]
        assert numbers == [(number, op, 6) for op in (0, 4, 2, 3, 1)]
    assert reduction("all_reduce", torch.empty(6, dtype=torch.complex64), "sum") == (7, 0, 12)
    assert reduction("all_reduce", torch.empty(6, dtype=torch.bool), "sum") == (1, 2, 6)


def test_sums_may_be_formed_in_a_wider_float() -> None:
    for narrow, wide in (
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float64),
    ):
        check_widening(torch.empty(2, dtype=wide), torch.empty(4, dtype=narrow), "avg")
    with pytest.raises(TypeError):
        check_widening(torch.empty(2), torch.empty(4, dtype=torch.int32), "sum")
    with pytest.raises(TypeError):
        check_same_dtype("all_gather", torch.empty(2), torch.empty(2, dtype=torch.float64))


def test_hook_offers_the_backend_under_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BMT_DISABLE_PLUGINS", raising=False)
    assert plugin.bmt_comm_backends() == [NcclBackend]
    assert Registry.load().find("comm backend", "nccl-native") is NcclBackend


def test_without_a_gpu_every_rank_gets_one_error_with_reason_and_remedy() -> None:
    outcomes = rank_pool(2).outcomes(
        ranks_do_nothing, init={"comm_backend": NcclBackend, "device": "cpu"}
    )
    for outcome in outcomes:
        assert outcome.error_type == "ConfigError", outcome
        assert outcome.error_message == (
            "comm_backend='nccl-native' cannot be used: it moves tensors between GPUs, and this"
            " run's device is cpu. Start on GPUs, or choose comm_backend='torch'."
        )


def ranks_do_nothing() -> None:
    pass


def ids_through_the_store(path: str) -> list[bytes]:
    """Two groups of two of four ranks, one after the other."""
    backend = current().backend
    assert backend.context.store is not None
    rank, library = backend.context.rank, native().Library(path)
    ids = []
    for number, partition in enumerate([[(0, 1), (2, 3)], [(0, 2), (1, 3)]]):
        own = next(ranks for ranks in partition if rank in ranks)
        key = f"test/{number}/{own[0]}"
        ids.append(
            shared_unique_id(library, backend.context.store, key, own, own.index(rank), 20.0)
        )
    return ids


def test_the_ranks_of_a_group_and_no_others_share_an_id(tmp_path: Path) -> None:
    path = compiled("nccl", tmp_path / "libnccl.so.2")
    (a, e), (b, f), (c, g), (d, h) = run_ranks(ids_through_the_store, 4, path)
    assert a == b and c == d and e == g and f == h
    assert len({a, c, e, f}) == 4 and all(len(unique_id) == 128 for unique_id in (a, c, e, f))


def id_that_nobody_makes(path: str) -> str:
    backend = current().backend
    assert backend.context.store is not None
    if backend.context.rank == 0:
        return ""
    with pytest.raises(NcclError) as caught:
        shared_unique_id(native().Library(path), backend.context.store, "test/none", (0, 1), 1, 0.3)
    return str(caught.value)


def test_a_first_rank_that_does_not_come_is_named(tmp_path: Path) -> None:
    path = compiled("nccl", tmp_path / "libnccl.so.2")
    said = run_ranks(id_that_nobody_makes, 2, path)[1]
    assert said == (
        "Rank 1 waited 0.3 s for rank 0 to make the group of ranks (0, 1). Look at the output"
        " of rank 0."
    )
