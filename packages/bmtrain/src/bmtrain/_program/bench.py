"""``bmt bench``: measure how fast ranks exchange data."""

from __future__ import annotations

import os

import click

from bmt_core.errors import ConfigError
from bmt_core.launch import Launch
from bmt_core.run import runtime
from bmtrain import _benchmark as benchmark
from bmtrain._program.byte_sizes import parse_bytes


@click.command()
@click.option(
    "--op",
    "operations",
    type=click.Choice(list(benchmark.OPERATIONS)),
    multiple=True,
    help="What to measure; may be given several times. By default everything.",
)
@click.option(
    "--max-bytes",
    type=parse_bytes,
    metavar="BYTES",
    help="Largest size. By default 64M on the CPU and 1G on GPUs.",
)
@click.option(
    "--device",
    type=click.Choice(["cpu", "cuda"]),
    help="By default the GPU of each rank, if there is one.",
)
def bench(operations: tuple[str, ...], max_bytes: int | None, device: str | None) -> None:
    """Measure all_gather, reduce_scatter and send_recv between ranks.

    Start it like a training: torchrun --nproc_per_node=N -m bmtrain bench. It uses the backend
    of the run, sizes grow, and rank 0 prints. Bus bandwidth is S/t x (n-1)/n for all_gather and
    reduce_scatter of S bytes over n ranks, and S/t for send_recv.

    Exit status 0 when all was measured, 2 when it could not be.
    """
    if Launch.from_env(os.environ).world_size == 1:
        raise ConfigError(
            "bmt bench measures what ranks exchange, and this is a run of one rank. Start two or"
            " more: torchrun --nproc_per_node=2 -m bmtrain bench"
        )
    runtime.init_distributed(device=device)
    try:
        for operation in operations or benchmark.OPERATIONS:
            benchmark.OPERATIONS[operation](max_bytes=max_bytes)
    finally:
        runtime.shutdown()
