"""``bmt checkpoint``: look at checkpoints, verify, convert and compare them, in one process and one
tensor at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import click

from bmt_checkpoint import CheckpointReader
from bmt_checkpoint.differences import tensor_differences, training_differences
from bmt_checkpoint.format import ForeignEntry
from bmt_checkpoint.format_choice import choose_known_format, open_checkpoint
from bmt_checkpoint.manager_state import OPTIMIZER, rank_file
from bmt_checkpoint.saving import write_checkpoint
from bmt_checkpoint.torch_file import read_torch_file
from bmt_checkpoint.training_folder import (
    MODEL,
    TRAINING,
    find_checkpoint,
    format_of,
    latest,
    part_of,
    read_training,
)
from bmt_core.cli.output import make_console, make_table, styled
from bmt_core.errors import CheckpointError
from bmt_params.state.index import TensorEntry

_PATH = click.Path(path_type=Path)


@click.group()
def checkpoint() -> None:
    """Inspect, verify, convert and compare checkpoints.

    PATH is a file, a directory of safetensors, or a directory of save_checkpoint(), whose model is
    then meant.
    """


@checkpoint.command()
@click.argument("path", type=_PATH)
def inspect(path: Path) -> None:
    """List what PATH holds."""
    console = make_console()
    if training := _training_of(path):
        optimizer = f"optimizer state: {training['optimizer']}"
        console.print(
            styled(
                f"step {training['step']}, saved by {training['world_size']} rank(s), {optimizer}"
            )
        )
    with closing(_open(path)) as reader:
        table = make_table(str(path), "name", "shape", "dtype", "bytes")
        total = 0
        for name, entry in reader.index.entries.items():
            cells = [name, "-", type(entry).__name__, "-"]
            if isinstance(entry, TensorEntry):
                size = entry.shape.numel() * entry.dtype.itemsize if entry.source == name else 0
                total += size
                cells[1:] = [
                    str(tuple(entry.shape)),
                    str(entry.dtype).removeprefix("torch."),
                    f"{size:,}",
                ]
                if entry.source != name:
                    cells[3] = f"tied to {entry.source}"
            table.add_row(*map(styled, cells))
    console.print(table)
    console.print(f"{len(reader.index.entries)} entries, {total:,} bytes")


@checkpoint.command(short_help="Read all of PATH and compare its checksums.")
@click.argument("path", type=click.Path(exists=True, path_type=Path))
def verify(path: Path) -> None:
    """Read all of PATH and compare its checksums, which files of other programs may lack.

    Exit status 1 if it is damaged.
    """
    try:
        _read_all(path)
    except CheckpointError as error:
        raise click.ClickException(str(error)) from error  # whose status is 1
    click.echo(f"All of {path} was read, and agrees with what checksums it has.")


def _read_all(path: Path) -> None:
    training, folder = _training_of(path), _training_folder(path)
    with ExitStack() as opened:
        readers = [opened.enter_context(closing(_open(path)))]
        if training is not None and folder is not None:
            form = format_of(training)
            if (tensors := part_of(folder, OPTIMIZER, form)).exists():
                readers.append(opened.enter_context(closing(open_checkpoint(tensors, form))))
            for file in sorted(folder.glob(rank_file("*"))):
                read_torch_file(file)
        for reader in readers:
            reader.verify(0, 1)
            for entry in _own_tensors(reader):
                reader.read(entry.source)


@checkpoint.command(short_help="Write the model in SOURCE to TARGET in another format.")
@click.argument("source", type=_PATH)
@click.argument("target", type=_PATH)
def convert(source: Path, target: Path) -> None:
    """Write the model in SOURCE to TARGET, in the format of its suffix (.dcp: a directory for
    torch.distributed.checkpoint).
    """
    chosen = choose_known_format(target)
    if target.is_dir() and not chosen.is_directory:
        raise click.UsageError(
            f"{target} is a directory. Name a file, such as {target / 'model.safetensors'}."
        )
    with closing(_open(source)) as reader:
        _refuse_foreign(source, reader)
        reader.verify(0, 1)
        tensors = ((entry.source, reader.read(entry.source)) for entry in _own_tensors(reader))
        write_checkpoint(target, chosen, reader.index, tensors)
        click.echo(
            f"The model of {source} is in {target}: {len(reader.index.entries)} entries,"
            f" format {chosen.name}."
        )


@checkpoint.command(short_help="Compare two models or trainings.")
@click.argument("one", type=_PATH)
@click.argument("other", type=_PATH)
def diff(one: Path, other: Path) -> None:
    """Compare two models, and of two trainings also their optimizers and the rest.

    Exit status 1 if they differ.
    """
    folders = _training_folder(one), _training_folder(other)
    with closing(_open(one)) as first, closing(_open(other)) as second:
        _refuse_foreign(one, first)
        _refuse_foreign(other, second)
        differences = list(tensor_differences(first, second, (one, other)))
    if folders[0] is not None and folders[1] is not None:
        differences += training_differences(folders[0], folders[1])
    for line in differences:
        click.echo(line)
    if differences:
        raise SystemExit(1)
    trainings = [
        str(path) for path, folder in zip((one, other), folders, strict=True) if folder is not None
    ]
    click.echo(
        "Equal."
        if len(trainings) != 1
        else f"The models are equal. {trainings[0]} also holds a training's state."
    )


def _refuse_foreign(path: Path, reader: CheckpointReader) -> None:
    foreign = [n for n, entry in reader.index.entries.items() if isinstance(entry, ForeignEntry)]
    if foreign:
        raise CheckpointError(
            f"{path} holds more than tensors: {', '.join(foreign[:8])}. Save the state dict alone."
        )


def _open(path: Path) -> CheckpointReader:
    training, folder = _training_of(path), _training_folder(path)
    if training is None or folder is None:
        return open_checkpoint(path)
    form = format_of(training)
    return open_checkpoint(part_of(folder, MODEL, form), form)


def _training_of(path: Path) -> dict[str, Any] | None:
    folder = _training_folder(path)
    return None if folder is None else read_training(folder)


def _training_folder(path: Path) -> Path | None:
    is_training = path.is_dir() and (latest(path) or (path / TRAINING).is_file())
    return find_checkpoint(path) if is_training else None


def _own_tensors(reader: CheckpointReader) -> Iterator[TensorEntry]:
    for name, entry in reader.index.entries.items():
        if isinstance(entry, TensorEntry) and entry.source == name:
            yield entry
