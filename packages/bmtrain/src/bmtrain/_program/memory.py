"""``bmt memory``: say what a training takes of each GPU, what fits, and how to write it."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import click
from click.core import ParameterSource
from rich.console import Console

from bmt_core.cli.output import make_console, make_table, styled
from bmtrain._program.byte_sizes import parse_bytes
from bmtrain._program.model_shape import MODELS, ModelShape, shape_of
from bmtrain._program.setting_search import GIB, fastest
from bmtrain._program.step_memory import (
    BFLOAT16,
    FLOAT32,
    KEEPS,
    Memory,
    Setting,
    memory_of,
)

USABLE = 0.9
"""What a training may take of a GPU by the formulas; the rest is for what they leave out."""


_OFFLOADS = "offload_inputs=True"


def _keep(context: click.Context, parameter: click.Parameter, text: str) -> str | int:
    return text if text in KEEPS else parse_bytes(text)


@click.command(short_help="Predict the memory of each GPU, and find settings that fit.")
@click.option(
    "--model",
    "name",
    required=True,
    metavar="MODEL",
    help=f"{', '.join(MODELS)}; a config.json of transformers or its directory; or MODULE:FACTORY.",
)
@click.option("--gpus", type=click.IntRange(1), required=True, help="GPUs of the whole run.")
@click.option("--seq", "sequence", type=click.IntRange(1), required=True, help="Tokens a sequence.")
@click.option(
    "--batch",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Sequences in a micro-batch of one GPU, or of one group of --tp x --cp GPUs.",
)
@click.option(
    "--micro-batches",
    type=click.IntRange(1),
    help="In a step. By default 1, and 4 for each stage of a pipeline.",
)
@click.option("--tp", type=click.IntRange(1), default=1, help="GPUs that split each layer.")
@click.option("--pp", type=click.IntRange(1), default=1, help="Stages of a pipeline.")
@click.option("--cp", type=click.IntRange(1), default=1, help="GPUs that share each sequence.")
@click.option(
    "--level", type=click.IntRange(0, 3), default=3, show_default=True, help="ZeRO level."
)
@click.option(
    "--shard-size", type=click.IntRange(1), help="GPUs that share one copy. By default all."
)
@click.option(
    "--keep",
    default="none",
    show_default=True,
    callback=_keep,
    metavar="WHAT",
    help=f"What recomputation keeps: {', '.join(KEEPS)} (no recomputation), or bytes such as 24G.",
)
@click.option("--offload-inputs", is_flag=True, help="Inputs of layers wait in host memory.")
@click.option("--offload", is_flag=True, help="Masters and moments are in host memory.")
@click.option("--lora", type=click.IntRange(1), metavar="R", help="Train adapters of rank R only.")
@click.option("--fused-loss", is_flag=True, help="The loss makes no whole logits.")
@click.option("--compile", "compiled", is_flag=True, help="Blocks are compiled.")
@click.option("--dtype", type=click.Choice(["bf16", "fp32"]), help="By default that of the model.")
@click.option(
    "--gpu-memory", metavar="BYTES", type=parse_bytes, help="Of one GPU, such as 80GB: what fits?"
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON, in bytes.")
@click.pass_context
def memory(
    context: click.Context,
    /,
    name: str,
    dtype: str | None,
    gpu_memory: int | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Predict the memory of each GPU in a step of training, part by part.

    With --gpu-memory, also find the fastest setting that fits; options that you give stay as they
    are. The formulas leave out the CUDA context, the communication library and fragmentation, so
    that nine tenths of --gpu-memory count as usable.

    Exit status 0; with --gpu-memory 1 if the setting that you gave does not fit.
    """
    model, is_half = shape_of(name)
    each = FLOAT32 if dtype == "fp32" or (dtype is None and not is_half) else BFLOAT16
    if options["micro_batches"] is None:
        options["micro_batches"] = 4 * options["pp"] if options["pp"] > 1 else 1
    setting = Setting(**options, each=each)
    predicted = memory_of(model, setting)
    room, found = None, None
    if gpu_memory is not None:
        given = (
            option
            for option in ("tp", "pp", "level", "keep", "offload", "fused_loss")
            if context.get_parameter_source(option) == ParameterSource.COMMANDLINE
        )
        room = USABLE * gpu_memory
        found = fastest(model, setting, room, fixed=frozenset(given))
    if as_json:
        _print_json(model, setting, predicted, room, found)
    else:
        _print_tables(model, setting, predicted, room, found)
    if room is not None and predicted.peak > room:
        context.exit(1)


def _print_json(
    model: ModelShape,
    setting: Setting,
    predicted: Memory,
    room: float | None,
    found: Setting | None,
) -> None:
    result: dict[str, object] = {
        "model": asdict(model),
        "setting": asdict(setting),
        "memory": {**asdict(predicted), "peak": predicted.peak},
    }
    if room is not None:
        result["usable"] = room
        result["fits"] = predicted.peak <= room
        result["fastest"] = found and {
            "setting": asdict(found),
            "peak": memory_of(model, found).peak,
        }
    click.echo(json.dumps(result, indent=2))


def _print_tables(
    model: ModelShape,
    setting: Setting,
    predicted: Memory,
    room: float | None,
    found: Setting | None,
) -> None:
    console = make_console()
    title = (
        f"{model.name}, {model.parameters / 1e9:.2f} B parameters, on each of {setting.gpus} GPUs"
    )
    table = make_table(title, "part", "GiB", "")
    for part, size, words in _rows(predicted):
        table.add_row(styled(part), styled(f"{size / GIB:,.1f}"), styled(words))
    table.add_section()
    moment = max(predicted.at, key=lambda name: predicted.at[name])
    table.add_row(
        styled("peak", "bold"),
        styled(f"{predicted.peak / GIB:,.1f}", "bold"),
        styled(f"at the {moment}"),
    )
    console.print(table)
    if moment == "loss":
        console.print(styled("A loss in chunks makes no whole logits: see --fused-loss."))
    if room is None:
        _print_setting(console, model, setting)
        return
    fits = "fits" if predicted.peak <= room else "does not fit"
    console.print(styled(f"This {fits} into {room / GIB:,.1f} GiB, nine tenths of a GPU.\n"))
    if found is None:
        console.print(
            styled("No setting fits. Use more GPUs, shorter sequences, or give fewer options.")
        )
        return
    peak = memory_of(model, found).peak
    console.print(styled(f"The fastest setting that fits, with a peak of {peak / GIB:,.1f} GiB:"))
    _print_setting(console, model, found)


def _rows(predicted: Memory) -> list[tuple[str, float, str]]:
    rows = [
        ("parameters", predicted.parameters, "shards"),
        ("masters", predicted.masters, "float32, for Adam"),
        ("moments", predicted.moments, "of Adam"),
        ("gradients", predicted.gradients, "shards"),
        ("gathered weights", predicted.gathered, "layers, embedding, head"),
        ("gradients in flight", predicted.in_flight, "before reduction"),
        ("kept activations", predicted.kept, "until backward"),
        ("one layer", predicted.layer, "in backward"),
        ("logits", predicted.logits, "with gradients"),
    ]
    if predicted.host:
        rows.append(("host memory", predicted.host, "not of the GPU"))
    return rows


def _print_setting(console: Console, model: ModelShape, setting: Setting) -> None:
    console.print(styled("\n".join(code_of(model, setting)), "cyan"))


def code_of(model: ModelShape, setting: Setting) -> list[str]:
    """Return the lines of Python that train by ``setting``.

    >>> code_of(MODELS["llama3-8b"], Setting(gpus=8, sequence=4096, level=2, keep=2**30))
    ['bmt.init_distributed(zero_level=2)', 'bmt.BMTrainModelWrapper(model, keep=1 * 2**30)']
    """
    sizes = {"pipe_size": setting.pp, "cp_size": setting.cp, "tp_size": setting.tp}
    arguments = [f"{name}={size}" for name, size in {**sizes, "zero_level": setting.level}.items()]
    shown = [text for text in arguments if not text.endswith("_size=1")]
    if setting.shard < setting.data_ranks:
        shown.append(f"shard_size={setting.shard // setting.cp}")
    lines = [f"bmt.init_distributed({', '.join(shown)})"]
    if setting.tp > 1:
        lines.append("bmt_tp.parallelize(model)")
    if setting.fused_loss:
        lines.append("bmt_hf.use_linear_cross_entropy(model)")
    lines += _code_of_layers(model, setting)
    if setting.offload:
        lines.append("bmt.optim.AdamOffloadOptimizer(model.parameters())")
    return lines


def _code_of_layers(model: ModelShape, setting: Setting) -> list[str]:
    """The wrapper takes ``keep``, and a Block also ``use_checkpoint``; bytes of a Block are those
    of its own calls.
    """
    keep = "" if setting.keep in ("none", "all") else _keep_argument(setting.keep)
    if setting.pp > 1:
        if isinstance(setting.keep, int):
            keep = f"keep={(setting.keep * setting.pp // model.layers) >> 20} * 2**20"
        return [
            f"bmt.PipelineTransformerBlockList({_blocks(setting, keep)})",
            "bmt_pipeline.train_step(model, loss_fn, batch,"
            f" num_micro_batches={setting.micro_batches})",
        ]
    if setting.keep == "all" or setting.compiled:
        layers = f"torch.nn.ModuleList({_blocks(setting, keep)})"
        return [f"model.layers = {layers}", "bmt.BMTrainModelWrapper(model)"]
    arguments = filter(None, ["model", keep, _OFFLOADS if setting.offload_inputs else ""])
    return [f"bmt.BMTrainModelWrapper({', '.join(arguments)})"]


def _blocks(setting: Setting, keep: str) -> str:
    arguments = ["layer", "use_checkpoint=False" if setting.keep == "all" else keep]
    arguments.append("compile=True" if setting.compiled else "")
    arguments.append(_OFFLOADS if setting.offload_inputs and setting.keep != "all" else "")
    return f"bmt.Block({', '.join(filter(None, arguments))}) for layer in model.layers"


def _keep_argument(keep: str | int) -> str:
    if isinstance(keep, int):
        whole, rest = divmod(keep, GIB)
        return f"keep={keep}" if rest else f"keep={whole} * 2**30"
    parts = tuple(keep.split("+"))
    return f"keep={parts if len(parts) > 1 else parts[0]!r}"
