"""``tp-block``: milliseconds of one tensor-parallel block, forward and backward, under bmt and
torch's DTensor.

Start it with torchrun. All ranks are one tensor-parallel group. "local" is what one rank computes,
with nothing communicated. Every block that communicates is compared with the whole one, see
:func:`disagreement`. The variants run in turns, several rounds, because other work of the host
slows some seconds down.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
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

# In this order: the processes that compile take the host's time while they start, and "local" waits
# for nobody.
VARIANTS = (
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
    """One variant at one number of tokens, on the slowest rank. Memory is that of all blocks of the
    chain, in GiB.

    ``ms_per_block`` is the median of the rounds, each of which is the median of its loops;
    ``rounds`` are these medians.
    """

    variant: str
    tokens: int
    status: str
    reason: str = ""
    ms_per_block: float | None = None
    rounds: Sequence[float] = ()
    peak_allocated: float | None = None
    fused_products: int | None = None
    disagreement: str | None = None


def main(arguments: Sequence[str]) -> int:
    """Measure and print the table; the exit status is 1 if a case failed otherwise than for lack
    of memory.
    """
    options = _parser().parse_args(arguments)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    bmt.init_distributed(
        device=options.device, timeout=TIMEOUT_SECONDS, tp_size=world, check_calls=False
    )
    try:
        device = bmt.current().device
        prepare(device)
        run = describe_run(arguments, device)
        rows: list[Figures] = []
        for tokens in (int(text) for text in options.tokens.split(",")):
            cases = []
            for variant in options.variants.split(","):
                cases.append(_Case(variant, tokens, options, device))
                cases[-1].attempt(cases[-1].make)
            for _ in range(options.rounds):
                for case in cases:
                    case.attempt(case.run)
            for case in cases:
                case.attempt(case.end)
                rows.append(case.figures())
                if bmt.rank() == 0:
                    append(
                        options.output,
                        {**run, "size": options.size, "blocks": options.blocks, **asdict(rows[-1])},
                    )
                    print(
                        f"{case.variant}, {tokens} tokens: {_cell(rows[-1])}"
                        f" {_rounds_or_reason(rows[-1])}",
                        flush=True,
                    )
                stop_if_stuck(device, rows[-1].status, lambda: format_table(rows, options.blocks))
            cases.clear()
            free_memory(device, compiled=True)
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
    notes = [
        f"{row.variant}, {row.tokens} tokens: {row.disagreement}"
        for row in rows
        if row.disagreement is not None
    ]
    notes += [
        (
            f"{row.variant}, {row.tokens} tokens: {row.fused_products} fused products in a chain"
            f" of {blocks}"
        )
        for row in rows
        if row.fused_products is not None
    ]
    return "\n".join([*(f"| {' | '.join(line)} |" for line in lines), "", *notes])


def disagreement(blocks: Blocks, reference: Reference) -> tuple[float, str]:
    """Return how much further from the truth ``blocks`` are than the whole block is, where that is
    worst. Collective.

    The truth is the whole block in the next wider dtype. What is compared, by the relative norm of
    the error: the output, the gradient of the input, and the gradient of every parameter.
    """
    output, gradient = blocks.run(*reference.own_rows())
    found = {
        "output": _all_rows(output),
        "gradient of the input": _all_rows(gradient),
        **blocks.whole_gradients(),
    }
    blocks.clear()
    errors = reference.errors(found)
    worst = max(errors, key=lambda name: errors[name] / reference.rounding[name])
    ratio = errors[worst] / reference.rounding[worst]
    return ratio, (
        f"errors at most {ratio:.2f} times those of the whole block"
        f" ({worst}: {errors[worst]:.1e} and {reference.rounding[worst]:.1e})"
    )


class Reference:
    """The whole block, on one rank: what it computes in a wider dtype, and by how much it is off in
    its own.
    """

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


def whole_rows(
    size: Size, dtype: torch.dtype, device: torch.device, tokens: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return an input and a gradient of the output, (sequence, batch, hidden): the same on
    every rank.
    """
    generator = torch.Generator(device).manual_seed(SEED)
    shape = (size.sequence, tokens // size.sequence, size.dim_model)
    rows = torch.randn((2, *shape), generator=generator, dtype=dtype, device=device)
    return rows[0], rows[1]


def own_rows(whole: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of the sequence."""
    return bmt.utils.tp_split_tensor(whole, 0)


def _all_rows(rows: torch.Tensor) -> torch.Tensor:
    return bmt.distributed.all_gather(rows, bmt.config.tp_comm).flatten(0, 1)


class _Case:
    """One variant at one number of tokens. After a failure, :meth:`attempt` does nothing
    any more.
    """

    def __init__(
        self, variant: str, tokens: int, options: argparse.Namespace, device: torch.device
    ) -> None:
        self.variant = variant
        self._tokens = tokens
        self._options = options
        self._device = device
        self._status, self._reason = OK, ""
        self._agreement: str | None = None
        self._peak: float | None = None
        self._fused: int | None = None
        self._step: Callable[[], None] | None = None
        self._medians: list[float] = []

    def attempt(self, part: Callable[[], None]) -> None:
        """Call ``part``, and note its failure. Collective."""
        if self._status != OK:
            return
        if self.variant.endswith("async") and self._device.type != "cuda":
            self._status, self._reason = "skipped", "needs GPUs"
            return
        try:
            part()
        except CaseFailed as failure:
            self._status, self._reason, self._step = failure.status, failure.reason, None

    def make(self) -> None:
        """Make the blocks, compare one with the whole block at the least number of tokens, and
        warm up.
        """
        options, device = self._options, self._device
        if KINDS[self._kind].communicates and self._tokens == min(
            int(text) for text in options.tokens.split(",")
        ):
            size, dtype = SIZES[options.size], DTYPES[options.dtype]
            self._agreement = together(
                lambda: _agreement(self._blocks(1), Reference(size, dtype, device, self._tokens))
            )
        free_memory(device, compiled=False)
        before = peak_gib(device)
        self._step = self._step_of(together(lambda: self._blocks(options.blocks)))
        repeat(self._step, options.warmup, device)
        peak = peak_gib(device)
        # Without what the blocks of other variants hold.
        if before is not None and peak is not None:
            self._peak = largest([peak[0] - before[0]])[0]

    def run(self) -> None:
        """Run one round."""
        assert self._step is not None
        seconds = largest(repeat(self._step, self._options.loops, self._device))
        self._medians.append(statistics.median(seconds) * 1000 / self._options.blocks)

    def end(self) -> None:
        """Count fused products, and write a trace of one block if asked for."""
        assert self._step is not None
        if self.variant.endswith("async"):
            self._fused = together(functools.partial(_fused_products, self._step))
        self._step = None
        if self._options.trace is not None:
            step = self._step_of(together(lambda: self._blocks(1)))
            repeat(step, self._options.warmup, self._device)
            path = self._options.trace / f"{self.variant.replace(' ', '-')}-{self._tokens}.json.gz"
            together(lambda: write_trace(step, path))
            together(lambda: synchronize(self._device))

    def figures(self) -> Figures:
        """Return what was found."""
        return Figures(
            variant=self.variant,
            tokens=self._tokens,
            status=self._status,
            reason=self._reason,
            ms_per_block=statistics.median(self._medians) if self._status == OK else None,
            rounds=self._medians,
            peak_allocated=self._peak,
            fused_products=self._fused,
            disagreement=self._agreement,
        )

    @property
    def _kind(self) -> str:
        return self.variant.split(" ")[0]

    def _blocks(self, count: int) -> Blocks:
        size, dtype = SIZES[self._options.size], DTYPES[self._options.dtype]
        return KINDS[self._kind](size, dtype, self._device, count, mode=self.variant.split(" ")[1])

    def _step_of(self, blocks: Blocks) -> Callable[[], None]:
        size, dtype = SIZES[self._options.size], DTYPES[self._options.dtype]
        rows, gradient = (
            own_rows(whole).clone() for whole in whole_rows(size, dtype, self._device, self._tokens)
        )

        def step() -> None:
            blocks.run(rows, gradient)
            blocks.clear()

        return step


def _agreement(blocks: Blocks, reference: Reference) -> str:
    ratio, text = disagreement(blocks, reference)
    if ratio > MAX_ROUNDINGS:
        raise ValueError(f"The parallel block computes something else: {text}.")
    return text


def _fused_products(step: Callable[[], None]) -> int:
    """Return how many products with communication inside torch's compiler has made. Collective."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        step()
    return sum(
        event.count for event in profiler.key_averages() if event.key.startswith("symm_mem::fused")
    )


def _cell(row: Figures | None) -> str:
    if row is None:
        return ""
    if row.status != OK:
        return row.reason if row.status == "skipped" else row.status
    memory = "" if row.peak_allocated is None else f" ({row.peak_allocated:.2f})"
    return f"{row.ms_per_block:.3f}{memory}"


def _rounds_or_reason(row: Figures) -> str:
    return (
        f"(rounds: {', '.join(f'{ms:.3f}' for ms in row.rounds)})"
        if row.status == OK
        else row.reason
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench tp-block", description=__doc__)
    add = parser.add_argument
    add(
        "--size", choices=SIZES, default="13b", help="the model that the block is of (default: 13b)"
    )
    add(
        "--tokens", default="2048,4096,8192", help="of all ranks together (default: 2048,4096,8192)"
    )
    add("--variants", default=",".join(VARIANTS), help="default: all")
    add("--blocks", type=int, default=4, metavar="N", help="blocks in a chain (default: 4)")
    add(
        "--warmup",
        type=int,
        default=3,
        metavar="N",
        help="loops before those that count (default: 3)",
    )
    add("--loops", type=int, default=20, metavar="N", help="loops of one round (default: 20)")
    add(
        "--rounds",
        type=int,
        default=5,
        metavar="N",
        help="rounds, in which the variants take turns (default: 5)",
    )
    add("--dtype", choices=DTYPES, default="bf16", help="default: bf16")
    add("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    add(
        "--output",
        type=Path,
        default=Path("runs/tp_block.jsonl"),
        metavar="FILE",
        help="records are added to it",
    )
    add(
        "--trace",
        type=Path,
        metavar="DIR",
        help="also profile two loops of one block on rank 0 into DIR",
    )
    return parser
