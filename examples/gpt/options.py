"""``Options``: what ``train.py`` is asked to do."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch

from bmt_core.settings import DEFAULT_REDUCE_DTYPE, ReduceDtype
from bmt_pipeline.schedules import SCHEDULES
from callbacks import CALLBACKS
from layers.float8 import RECIPES

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
CHECKPOINTS = "checkpoints"
_INSTALL = {
    "tensorboard": "pip install tensorboard",
    "torchao": "pip install torchao",
    "wandb": "pip install wandb",
}
# What a run that goes on must have in common with the one that it goes on from.
_FIXED = (
    "seed",
    "batch_size",
    "seq_len",
    "layers",
    "dim",
    "heads",
    "dtype",
    "float8",
    "optimizer",
    "lr",
    "warmup",
    "clip",
)


@dataclass(frozen=True, kw_only=True)
class Options:
    """One field per option of the command line; see ``train.py --help``."""

    data: Path | None
    max_bytes: int
    out: Path
    resume: Path | None
    init: Path | None
    seed: int
    device: str | None
    steps: int
    batch_size: int
    seq_len: int
    accumulate: int
    layers: int
    dim: int
    heads: int
    dtype: str
    optimizer: str
    lr: float
    warmup: int
    clip: float
    zero_level: int
    tp: int
    pipe: int
    micro_batches: int | None
    schedule: str
    checkpoint: bool
    compile: bool
    float8: str | None
    reduce_dtype: ReduceDtype
    overlap_forward: bool
    log_to: list[str]
    traceback: bool
    log_every: int
    eval_every: int
    eval_windows: int
    checkpoint_every: int
    timeout: float
    prompt: str
    sample_bytes: int

    @classmethod
    def parse(cls, arguments: Sequence[str] | None = None) -> Options:
        """Return the options in ``arguments`` (None: the command line), or end the program with
        an explanation.
        """
        parser = _parser()
        values = vars(parser.parse_args(arguments))
        values["log_to"] = values["log_to"] or []
        options = cls(**values)
        positive = (
            "steps batch_size seq_len accumulate layers dim heads tp pipe micro_batches"
            " log_every eval_every"
        )
        for name in [*positive.split(), "eval_windows", "checkpoint_every"]:
            if (value := getattr(options, name)) is not None and value < 1:
                parser.error(f"--{name.replace('_', '-')} must be at least 1, not {value}.")
        if options.dim % options.heads != 0:
            parser.error(f"--dim {options.dim} is not a multiple of --heads {options.heads}.")
        if options.resume is not None and options.init is not None:
            parser.error("--resume brings its own weights: leave out --init.")
        if options.pipe > 1 and options.accumulate > 1:
            parser.error("--pipe divides the batch into --micro-batches: leave out --accumulate.")
        if options.pipe == 1 and (
            options.micro_batches or options.schedule != parser.get_default("schedule")
        ):
            parser.error(
                "--micro-batches and --schedule are those of a pipeline: give --pipe 2 or more."
            )
        if options.overlap_forward and options.optimizer not in ("adam", "adamw"):
            parser.error(
                f"--overlap-forward is an option of adam and adamw, and not of {options.optimizer}."
            )
        if options.float8 is not None and options.tp > 1:
            parser.error(
                f"--float8 computes whole linear layers, and --tp {options.tp} splits them: leave"
                " out one of them."
            )
        needed = {f"--log-to {package}": package for package in options.log_to}
        if options.float8 is not None:
            needed["--float8"] = "torchao"
        for option, package in needed.items():
            if importlib.util.find_spec(package) is None:
                parser.error(
                    f"{option} needs the package {package}, which is not installed:"
                    f" {_INSTALL[package]}"
                )
        return options

    def fixed(self) -> dict[str, Any]:
        """Return what may not change when a run is resumed: all that the losses depend on, but its
        length and the ranks.
        """
        values = dataclasses.asdict(self)
        return {name: values[name] for name in _FIXED}


OTHER_TEXT = (
    "it trains on another text (--data and --max-bytes choose it; without --data it is Python's own"
    " sources, which differ between versions of Python)"
)


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return what differs between two results of :meth:`Options.fixed`, one text each.

    >>> differences({"seed": 0, "lr": 0.1}, {"seed": 1, "lr": 0.1})
    ['seed was 0 and is 1']
    >>> differences({"text": 1}, {"text": 2}) == [OTHER_TEXT]
    True
    """
    names = [*before, *(name for name in now if name not in before)]
    return [
        OTHER_TEXT if name == "text" else f"{name} was {before.get(name)} and is {now.get(name)}"
        for name in names
        if before.get(name) != now.get(name)
    ]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Train a byte-level GPT, sharded by ZeRO, on one process or under torchrun.",
        allow_abbrev=False,
    )

    data = _adder(parser, "data and results")
    data(
        "--data",
        type=Path,
        metavar="PATH",
        help="a file, or a directory of text files; without: Python's own sources",
    )
    data("--max-bytes", type=int, default=16 * 2**20, help="read no more text than this")
    data(
        "--out",
        type=Path,
        metavar="PATH",
        default=Path("runs/gpt"),
        help="directory for all that the run writes",
    )
    resume_help = (
        "go on from a checkpoint: a directory of them, or one step-N in it; without: the latest in"
        " --out, if there is one"
    )
    data("--resume", type=Path, metavar="PATH", help=resume_help)
    data(
        "--init",
        type=Path,
        metavar="PATH",
        help="begin with the weights in this file, as bmt.save wrote it",
    )
    data("--seed", type=int, default=0, help="of the weights and the order of the data")

    model = _adder(parser, "model")
    model("--layers", type=int, default=4, help="number of blocks")
    model("--dim", type=int, default=128, help="width")
    model("--heads", type=int, default=4, help="number of attention heads")
    model("--seq-len", type=int, default=128, help="bytes per sequence")
    model("--dtype", choices=sorted(DTYPES), default="fp32", help="of parameters and computation")

    training = _adder(parser, "training")
    training(
        "--steps",
        type=int,
        default=400,
        help="number of optimizer steps, those before a resume included",
    )
    training("--batch-size", type=int, default=32, help="sequences per step, of all ranks together")
    training("--accumulate", type=int, default=1, help="micro-batches per step")
    training(
        "--optimizer",
        default="adam",
        metavar="NAME",
        help="any that bmt.optim.available() lists, or muon for the matrices of the layers",
    )
    training("--lr", type=float, default=4e-3, help="highest learning rate")
    training(
        "--warmup",
        type=int,
        default=30,
        help="steps in which the learning rate rises, before it falls",
    )
    training("--clip", type=float, default=1.0, help="largest norm of the gradient")

    sharding = _adder(parser, "sharding")
    sharding("--zero-level", type=int, choices=range(4), default=3, help="ZeRO level of the blocks")
    sharding(
        "--tp",
        type=int,
        default=1,
        help="ranks that compute each block together, on the same sequences",
    )
    sharding(
        "--pipe",
        type=int,
        default=1,
        help="stages of a pipeline, over which the blocks are divided",
    )
    sharding(
        "--micro-batches",
        type=int,
        help="with --pipe: micro-batches per step; without: as many as stages",
    )
    sharding(
        "--schedule",
        choices=sorted(SCHEDULES),
        default="1f1b",
        help="with --pipe: the order of the stages' work",
    )
    sharding(
        "--no-checkpoint",
        dest="checkpoint",
        action="store_false",
        help="keep activations instead of recomputing them",
    )
    sharding("--device", metavar="DEVICE", help="cpu or cuda; without: cuda where there is one")

    speed = _adder(parser, "speed")
    speed("--compile", action="store_true", help="compile the blocks with torch.compile")
    float8_help = (
        "compute the linear layers of the blocks in float8, by torchao, with this recipe; without"
        " one: tensorwise, the fastest; tensorwise_gathered also sends weights in float8"
    )
    speed("--float8", nargs="?", const="tensorwise", choices=RECIPES, help=float8_help)
    reduce_help = (
        "how gradients of half types are summed; param: in their own dtype, for the least traffic"
    )
    speed(
        "--reduce-dtype",
        choices=get_args(ReduceDtype),
        default=DEFAULT_REDUCE_DTYPE,
        help=reduce_help,
    )
    overlap_help = "on GPUs, with Adam: update parameters while the next forward begins"
    speed("--overlap-forward", action="store_true", help=overlap_help)

    reports = _adder(parser, "reports")
    log_help = "write metrics there too, in --out or by the settings of wandb; may be given twice"
    reports("--log-to", choices=sorted(CALLBACKS), action="append", help=log_help)
    reports(
        "--traceback",
        action="store_true",
        help="show where an error came from, not only what it says",
    )
    reports("--log-every", type=int, default=10, help="steps between lines of metrics")
    reports(
        "--eval-every", type=int, default=100, help="steps between evaluations on held-out text"
    )
    reports("--eval-windows", type=int, default=512, help="sequences in an evaluation")
    reports("--checkpoint-every", type=int, default=200, help="steps between checkpoints")
    reports(
        "--timeout",
        type=float,
        default=1800.0,
        help="seconds after which ranks that wait for one that has failed end",
    )
    reports("--prompt", default="def ", help="beginning of the sample of generated text")
    reports("--sample-bytes", type=int, default=400, help="length of the sample; 0 for none")
    return parser


def _adder(parser: argparse.ArgumentParser, title: str) -> Callable[..., None]:
    """Return a function that adds an option to a new group; the help tells the default, if there
    is one.
    """
    group = parser.add_argument_group(title)

    def add(*names: str, help: str, **settings: Any) -> None:
        if settings.get("type") in (int, float) and "choices" not in settings:
            settings["metavar"] = "N"
        group.add_argument(
            *names,
            help=f"{help} (default: %(default)s)" if "default" in settings else help,
            **settings,
        )

    return add
