"""``bmt bench``: measure how fast ranks exchange data."""

from __future__ import annotations

import re

import click

from bmt_core.run import runtime
from bmtrain import _benchmark as benchmark

_UNITS = {"": 1, "k": 1024, "m": 1024**2, "g": 1024**3}


def parse_bytes(text: str) -> int:
    """Return a number of bytes from a text with an optional unit; units are powers of 1024.

    >>> parse_bytes("4096"), parse_bytes("64K"), parse_bytes("1GiB")
    (4096, 65536, 1073741824)
    """
    match = re.fullmatch(r"(\d+)\s*([kmg]?)(?:i?b)?", text.strip().lower())
    if match is None or int(match[1]) == 0:
        raise click.BadParameter(
            f"{text!r} is not a number of bytes. Write for example 65536, 64K, 64M or 1G."
        )
    return int(match[1]) * _UNITS[match[2]]


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
    """Measure all_gather, reduce_scatter and send_recv.

    Start it like a training: torchrun --nproc_per_node=N -m bmtrain bench. It uses the backend
    of the run, sizes grow, and rank 0 prints. Bus bandwidth is S/t x (n-1)/n for all_gather and
    reduce_scatter of S bytes over n ranks, and S/t for send_recv.
    """
    runtime.init_distributed(device=device)
    try:
        for operation in operations or _default_operations():
            benchmark.OPERATIONS[operation](max_bytes=max_bytes)
    finally:
        runtime.shutdown()


def _default_operations() -> list[str]:
    if runtime.world_size() > 1:
        return list(benchmark.OPERATIONS)
    click.echo(
        "One rank: nothing crosses a bus, and send_recv is left out. Start more ranks"
        " with torchrun."
    )
    return [operation for operation in benchmark.OPERATIONS if operation != "send_recv"]
