"""``tp-block``: milliseconds of one tensor-parallel block, forward and backward, under bmt and torch's DTensor.

Start it with torchrun. All ranks are one tensor-parallel group. "local" is what one rank computes, with nothing communicated.
Every block that communicates is compared with the whole one, see :func:`disagreement`.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

import bmtrain as bmt
from bench.case import DTYPES
from bench.device import free_memory, peak_gib, prepare, synchronize
from bench.models import SEED, SIZES, Size
from bench.ranks import FAILED, CaseFailed, largest, together
from bench.record import append, describe_run
from bench.run import TIMEOUT_SECONDS, stop_if_stuck
from bench.sequence_first import sequence_first
from bench.steps import repeat
from bench.table import OK
from bench.tp_blocks import KINDS, Blocks, dense_block
from bench.trace import write_trace

VARIANTS = (  # in this order: the processes that compile take the host's time while they start, and "local" waits for nobody
    "local eager",
    "local compiled",
    "dtensor eager",
    "dtensor compiled",
    "dtensor async",
    "bmt eager",
    "bmt compiled",
)
# A product's result is rounded once; cut in two, each part and their sum.
MAX_ROUNDINGS = 3.0


@dataclass(frozen=True, kw_only=True)
class Figures:
    """One variant at one number of tokens, on the slowest rank. Memory is that of all blocks of the chain, in GiB."""

    variant: str
    tokens: int
    status: str
    reason: str = ""
    ms_per_block: float | None = None
    peak_allocated: float | None = None
    fused_products: int | None = None
    disagreement: str | None = None


def main(arguments: Sequence[str]) -> int:
    """Measure and print the table; the exit status is 1 if a case failed otherwise than for lack of memory."""
    options = _parser().parse_args(arguments)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    bmt.init_distributed(device=options.device, timeout=TIMEOUT_SECONDS, tp_size=world, check_calls=False)
    try:
        device = bmt.current().device
        prepare(device)
        run = describe_run(arguments, device)
        rows: list[Figures] = []
        for variant in options.variants.split(","):
            for tokens in (int(text) for text in options.tokens.split(",")):
                started = time.perf_counter()
                rows.append(_measure_or_fail(variant, tokens, options, device))
                free_memory(device, compiled=True)
                if bmt.rank() == 0:
                    append(options.output, {**run, "size": options.size, "blocks": options.blocks, **asdict(rows[-1])})
                    took = time.perf_counter() - started
                    print(
                        f"{variant}, {tokens} tokens: {_cell(rows[-1])} {rows[-1].reason} (took {took:.1f} s)",
                        flush=True,
                    )
                stop_if_stuck(device, rows[-1].status, lambda: format_table(rows, options.blocks))
        if bmt.rank() == 0:
            print(f"\n{format_table(rows, options.blocks)}", flush=True)
    finally:
        bmt.shutdown()
    return int(any(row.status == FAILED for row in rows))


def format_table(rows: Sequence[Figures], blocks: int) -> str:
    """Return a line for each variant, and a column for each number of tokens."""
    found = {(row.variant, row.tokens): row for row in rows}
    counts = sorted({row.tokens for row in rows})
    header = ["ms per block (peak GiB of a chain)", *(f"{tokens} tokens" for tokens in counts)]
    lines = [header, ["---"] * len(header)]
    for variant in dict.fromkeys(row.variant for row in rows):
        lines.append([variant, *(_cell(found.get((variant, tokens))) for tokens in counts)])
    notes = [f"{row.variant}, {row.tokens} tokens: {row.disagreement}" for row in rows if row.disagreement is not None]
    notes += [
        f"{row.variant}, {row.tokens} tokens: {row.fused_products} fused products in a chain of {blocks}"
        for row in rows
        if row.fused_products is not None
    ]
    return "\n".join([*(f"| {' | '.join(line)} |" for line in lines), "", *notes])


def disagreement(blocks: Blocks, reference: Reference) -> tuple[float, str]:
    """Return how much further from the truth ``blocks`` are than the whole block is, where that is worst. Collective.

    The truth is the whole block in the next wider dtype. What is compared, by the relative norm of the error: the output, the
    gradient of the input, and the gradient of every parameter.
    """
    output, gradient = blocks.run(*reference.own_rows())
    found = {"output": _all_rows(output), "gradient of the input": _all_rows(gradient), **blocks.whole_gradients()}
    blocks.clear()
    errors = reference.errors(found)
    worst = max(errors, key=lambda name: errors[name] / reference.rounding[name])
    ratio = errors[worst] / reference.rounding[worst]
    return ratio, (
        f"errors at most {ratio:.2f} times those of the whole block"
        f" ({worst}: {errors[worst]:.1e} and {reference.rounding[worst]:.1e})"
    )


class Reference:
    """The whole block, on one rank: what it computes in a wider dtype, and by how much it is off in its own."""

    def __init__(self, size: Size, dtype: torch.dtype, device: torch.device, tokens: int) -> None:
        self.input, self.gradient = whole_rows(size, dtype, device, tokens)
        block = sequence_first(dense_block(size, dtype, device, 0), size)
        found = self._run(block, dtype)
        wider = torch.float64 if dtype == torch.float32 else torch.float32
        self.truth = self._run(block.to(wider), wider)
        self.rounding = self.errors(found)

    def own_rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return this rank's rows of the input and of the output's gradient."""
        return own_rows(self.input), own_rows(self.gradient)

    def errors(self, found: dict[str, torch.Tensor]) -> dict[str, float]:
        """Return the relative norm of the error of everything in ``found``."""
        return {
            name: float((found[name].to(truth.dtype) - truth).norm() / truth.norm())
            for name, truth in self.truth.items()
        }

    def _run(self, block: torch.nn.Module, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        block.zero_grad(set_to_none=True)
        rows = self.input.to(dtype).detach().requires_grad_()
        output: torch.Tensor = block(rows)
        output.backward(self.gradient.to(dtype))  # type: ignore[no-untyped-call]
        gradients: dict[str, Any] = {name: p.grad for name, p in block.named_parameters()}
        return {"output": output.detach(), "gradient of the input": rows.grad, **gradients}


def whole_rows(size: Size, dtype: torch.dtype, device: torch.device, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return an input and a gradient of the output, (sequence, batch, hidden): the same on every rank."""
    generator = torch.Generator(device).manual_seed(SEED)
    shape = (size.sequence, tokens // size.sequence, size.dim_model)
    rows = torch.randn((2, *shape), generator=generator, dtype=dtype, device=device)
    return rows[0], rows[1]


def own_rows(whole: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of the sequence."""
    return bmt.utils.tp_split_tensor(whole, 0)


def _all_rows(rows: torch.Tensor) -> torch.Tensor:
    return bmt.distributed.all_gather(rows, bmt.config.tp_comm).flatten(0, 1)


def _measure_or_fail(variant: str, tokens: int, options: argparse.Namespace, device: torch.device) -> Figures:
    if variant.endswith("async") and device.type != "cuda":
        return Figures(variant=variant, tokens=tokens, status="skipped", reason="needs GPUs")
    try:
        return _measure(variant, tokens, options, device)
    except CaseFailed as failure:
        return Figures(variant=variant, tokens=tokens, status=failure.status, reason=failure.reason)


def _measure(variant: str, tokens: int, options: argparse.Namespace, device: torch.device) -> Figures:
    kind, mode = variant.split(" ")
    size, dtype = SIZES[options.size], DTYPES[options.dtype]

    def make(count: int) -> Blocks:
        return KINDS[kind](size, dtype, device, count, mode=mode)

    agreement = None
    if KINDS[kind].communicates and tokens == min(int(text) for text in options.tokens.split(",")):
        agreement = together(lambda: _agreement(make(1), Reference(size, dtype, device, tokens)))
    blocks = together(lambda: make(options.blocks))
    rows, gradient = (own_rows(whole).clone() for whole in whole_rows(size, dtype, device, tokens))

    def step() -> None:
        blocks.run(rows, gradient)
        blocks.clear()

    repeat(step, options.warmup, device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    seconds = largest(repeat(step, options.loops, device))
    peak = peak_gib(device)
    figures = Figures(
        variant=variant,
        tokens=tokens,
        status=OK,
        ms_per_block=statistics.median(seconds) * 1000 / options.blocks,
        peak_allocated=None if peak is None else largest(peak)[0],
        fused_products=together(lambda: _fused_products(step)) if mode == "async" else None,
        disagreement=agreement,
    )
    if options.trace is not None:
        del blocks
        blocks = together(lambda: make(1))
        repeat(step, options.warmup, device)
        path = options.trace / f"{kind}-{mode}-{tokens}.json.gz"
        together(lambda: write_trace(step, path))
        together(lambda: synchronize(device))
    return figures


def _agreement(blocks: Blocks, reference: Reference) -> str:
    ratio, text = disagreement(blocks, reference)
    if ratio > MAX_ROUNDINGS:
        raise ValueError(f"The parallel block computes something else: {text}.")
    return text


def _fused_products(step: Callable[[], None]) -> int:
    """Return how many products with communication inside torch's compiler has made. Collective."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        step()
    return sum(event.count for event in profiler.key_averages() if event.key.startswith("symm_mem::fused"))


def _cell(row: Figures | None) -> str:
    if row is None:
        return ""
    if row.status != OK:
        return row.reason if row.status == "skipped" else row.status
    memory = "" if row.peak_allocated is None else f" ({row.peak_allocated:.2f})"
    return f"{row.ms_per_block:.3f}{memory}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench tp-block", description=__doc__)
    add = parser.add_argument
    add("--size", choices=SIZES, default="13b", help="the model that the block is of (default: 13b)")
    add("--tokens", default="2048,4096,8192", help="of all ranks together (default: 2048,4096,8192)")
    add("--variants", default=",".join(VARIANTS), help="default: all")
    add("--blocks", type=int, default=4, metavar="N", help="blocks in a chain (default: 4)")
    add("--warmup", type=int, default=3, metavar="N", help="loops before those that count (default: 3)")
    add("--loops", type=int, default=20, metavar="N", help="loops that count; the result is their median (default: 20)")
    add("--dtype", choices=DTYPES, default="bf16", help="default: bf16")
    add("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    add("--output", type=Path, default=Path("runs/tp_block.jsonl"), metavar="FILE", help="records are added to it")
    add("--trace", type=Path, metavar="DIR", help="also profile two loops of one block on rank 0 into DIR")
    return parser
