"""``bmt verify``: compare trainings of a model on ranks, drawn at random, with plain torch."""

from __future__ import annotations

import math
import traceback
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, get_args

import click
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bmt_core.cli.output import make_console
from bmt_core.settings import GradientsOfRanks
from bmt_testing.matches_single import ComparedTraining, Reference
from bmt_testing.named_functions import function_in, import_module_of
from bmt_testing.settings import TrainingSettings
from bmt_testing.strategies import training_settings
from bmt_testing.trainings import require
from bmt_testing.verification import Verification, verify_trainings
from bmt_testing.verify_report import print_result, write_report

_FAILED = 1


def _numbers(context: click.Context, parameter: click.Parameter, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(number) for number in text.split(","))
    except ValueError:
        raise click.BadParameter(f"{text!r} is not a list of numbers, such as 1,2,4.") from None


def _axes(
    context: click.Context, parameter: click.Parameter, texts: tuple[str, ...]
) -> dict[str, tuple[int, ...]]:
    for text in texts:
        if "=" not in text:
            raise click.BadParameter(f"{text!r} is not an axis with its sizes, such as tp=1,2.")
    pairs = (text.split("=", 1) for text in texts)
    return {name: _numbers(context, parameter, sizes) for name, sizes in pairs}


@click.command()
@click.argument("factory", metavar="MODULE:FACTORY", required=False)
@click.option(
    "--batch", default="batch", show_default=True, metavar="NAME", help="batch_fn, in MODULE."
)
@click.option("--loss", metavar="NAME", help="loss_fn, in MODULE, if the model returns no loss.")
@click.option("--parallelize", metavar="NAME", help="A function in MODULE that splits the model.")
@click.option("--optimizer", metavar="NAME", help="A function in MODULE: optimizer_fn(parameters).")
@click.option(
    "--train", metavar="NAME", help="A loop of your own in MODULE: train(model, data, rank, ranks)."
)
@click.option(
    "--reference",
    type=click.Choice(get_args(Reference)),
    default="whole",
    show_default=True,
    help="Plain torch on the whole batch, or on the ranks' parts of it, one by one.",
)
@click.option("--noise", is_flag=True, help="The model draws random numbers; see the reference.")
@click.option(
    "--batch-dim",
    default=0,
    show_default=True,
    help="The dim of tensors along which batches are divided.",
)
@click.option(
    "--gradients",
    type=click.Choice(get_args(GradientsOfRanks)),
    help="With --train, what its init_distributed is given.",
)
@click.option("--pipeline", metavar="PATH", help="The list of layers that becomes stages.")
@click.option(
    "--hf-config",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    metavar="DIR",
    help="In place of MODULE:FACTORY: a small model after the config.json of a causal language"
    " model of Hugging Face, with random values.",
)
@click.option(
    "--world", default="1,2,4", show_default=True, callback=_numbers, help="Numbers of ranks."
)
@click.option(
    "--axis",
    "axes",
    multiple=True,
    callback=_axes,
    metavar="NAME=SIZES",
    help="An axis along which the model is split, such as tp=1,2; may be given several times.",
)
@click.option(
    "--levels", default="0,1,2,3", show_default=True, callback=_numbers, help="ZeRO levels."
)
@click.option(
    "--examples", type=click.IntRange(1), default=50, show_default=True, help="Trainings to draw."
)
@click.option(
    "--steps", type=click.IntRange(1), default=3, show_default=True, help="Steps of each training."
)
@click.option("--seed", default=0, show_default=True, help="Another seed draws other trainings.")
@click.option(
    "--device",
    type=click.Choice(["cpu", "cuda"]),
    default="cpu",
    show_default=True,
    help="Of the ranks and of plain torch.",
)
@click.option(
    "--timeout",
    type=click.FloatRange(0, min_open=True),
    default=60.0,
    show_default=True,
    help="Seconds after which the ranks of a training are ended.",
)
@click.option(
    "--report",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Also write all that was drawn and found to this file, as JSON.",
)
@click.pass_context
def verify(
    context: click.Context,
    factory: str | None,
    batch: str,
    loss: str | None,
    parallelize: str | None,
    optimizer: str | None,
    train: str | None,
    reference: Reference,
    noise: bool,
    batch_dim: int,
    gradients: GradientsOfRanks | None,
    pipeline: str | None,
    hf_config: Path | None,
    world: tuple[int, ...],
    axes: Mapping[str, tuple[int, ...]],
    levels: tuple[int, ...],
    examples: int,
    steps: int,
    seed: int,
    device: str,
    timeout: float,
    report: Path | None,
) -> None:
    """Compare trainings of a model on ranks with plain torch in one process.

    FACTORY is a function of MODULE that takes nothing and returns a model of plain torch, and
    MODULE has a function batch(seed): those of bmt_testing.assert_matches_single, which says more
    about them. How each training is done is drawn at random: ranks, ZeRO levels, dtypes,
    recomputation, accumulation, frozen parameters, clipping. If one differs, simpler ones are
    tried, and the simplest that differs is printed.

    Exit status 0 if all are equal, 1 if one differs, 2 if nothing could be compared.
    """
    if (factory is None) == (hf_config is None):
        raise click.UsageError("Give one of MODULE:FACTORY and --hf-config DIR.")
    if hf_config is not None and (loss or parallelize or optimizer or train):
        raise click.UsageError(
            "--loss, --parallelize, --optimizer and --train name functions of MODULE, and"
            " --hf-config has none."
        )
    if gradients is not None and train is None:
        raise click.UsageError("--gradients is for --train. Without, both are drawn.")
    if report is not None and not report.parent.is_dir():
        raise click.UsageError(f"--report {report}: there is no folder {report.parent}. Make it.")
    model = factory or str(hf_config)
    names = {
        "batch_fn": batch,
        "loss_fn": loss,
        "parallelize": parallelize,
        "optimizer_fn": optimizer,
        "train": train,
    }
    try:
        training = ComparedTraining(
            **_functions_of(factory, names)
            if factory is not None
            else _functions_of_hugging_face(str(hf_config), math.lcm(*world), "tp" in axes),
            reference=reference,
            noise=noise,
            batch_dim=batch_dim,
            pipeline=pipeline,
            init={} if gradients is None else {"gradients": gradients},
            steps=steps,
            device=device,
            timeout=timeout,
        )
        result = _verify(training, world, axes, levels, examples, seed)
    except Exception as error:
        raise _NothingCompared(_one_line(model, error)) from error
    print_result(make_console(), model, training, result)
    if report is not None:
        write_report(report, model, training, _as_text(context.params), result)
    if result.failure is not None:
        raise SystemExit(_FAILED)


def _functions_of(factory: str, names: Mapping[str, str | None]) -> dict[str, Any]:
    module, name = import_module_of(factory)
    return {
        role: function_in(module, name, role)
        for role, name in {"model_fn": name, **names}.items()
        if name is not None
    }


def _functions_of_hugging_face(directory: str, rows: int, has_tp: bool) -> dict[str, Any]:
    from bmt_testing.hugging_face import small_causal_lm, token_batch

    return {
        "parallelize": require("bmt-tp").parallelize if has_tp else None,
        "model_fn": partial(small_causal_lm, directory),
        "batch_fn": partial(token_batch, directory, rows),
    }


def _verify(
    training: ComparedTraining,
    world: tuple[int, ...],
    axes: Mapping[str, tuple[int, ...]],
    levels: tuple[int, ...],
    examples: int,
    seed: int,
) -> Verification:
    # What would be an error in some examples is one before the first.
    training.check(TrainingSettings(ranks=max(world), levels=levels))
    for name, sizes in axes.items():
        training.check(TrainingSettings(ranks=max(sizes), axes={name: max(sizes)}))
    strategy = training_settings(ranks=world, axes=axes, levels=levels).map(training.used)
    console = make_console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns,
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as bar:
        task = bar.add_task("comparing", total=examples)

        def show(result: Verification, drawn: TrainingSettings) -> None:
            if result.needed:
                bar.update(
                    task,
                    description=f"example {result.needed} differs; {result.simpler}"
                    " simpler ones tried",
                )
            else:
                levels = ",".join(map(str, drawn.levels))
                now = f"ranks {drawn.ranks}, {drawn.dtype}, levels {levels}"
                bar.update(task, completed=len(result.examples), description=now)

        return verify_trainings(
            training.compare, strategy, examples=examples, seed=seed, progress=show
        )


class _NothingCompared(click.ClickException):
    exit_code = 2


def _one_line(model: str, error: Exception) -> str:
    """Return the message of an error of bmt, and of another one what and where it is."""
    frames = [
        (frame.f_globals.get("__name__", ""), Path(frame.f_code.co_filename).name, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if not frame.f_globals.get("__name__", "").startswith("torch")
    ]
    module, file, line = frames[-1]
    if module.startswith("bmt_"):
        return str(error)
    message = str(error).partition("\n")[0]
    return f"{model} failed: {type(error).__name__}: {message} ({file}, line {line})."


def _as_text(options: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: str(value) if isinstance(value, Path) else value
        for name, value in options.items()
        if value is not None
    }
