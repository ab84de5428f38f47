"""``Options``: what a run is asked to measure, and the cases that follow from it."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from bench.case import DTYPES, Case, Settings
from bench.models import GATHERED, SIZES
from bench.ours import Bmt
from bench.pipelines import SCHEDULES
from bench.real_models import CONFIGURATIONS, RealModel
from bench.toolkits import OF_REAL_MODELS, TOOLKITS
from bmt_core.settings import ReduceDtype

OURS = "bmt"
MIN_STEPS = 5
FLOAT8_RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp", GATHERED)
FLOAT8_TOOLKITS = (OURS, "fsdp2")
# Of what only bmt has.
_OF_PEERS = {
    "offload_inputs": False,
    "tile": None,
    "optimizer": "torch AdamW, fused",
    "device_memory": 0,
    "overlap_forward": False,
    "optimizer_shards": None,
}


@dataclass(frozen=True, kw_only=True)
class Options(Settings):
    """One field per option of the command line; see ``measure --help``."""

    model: str | None
    sequence: int
    layers: int | None
    lora: int | None
    keep: tuple[str | None, ...]
    peer_keep: tuple[str | None, ...]
    batch: tuple[int, ...]
    reduce_dtype: ReduceDtype | None
    peer_reduce_dtype: str
    toolkits: tuple[str, ...]
    interleave: bool
    device: str | None
    output: Path
    trace: Path | None

    @classmethod
    def parse(cls, arguments: Sequence[str]) -> Options:
        """Return the options in ``arguments``, or end the program with an explanation."""
        parser = _parser()
        options = cls(**vars(parser.parse_args(arguments)))
        if options.steps < MIN_STEPS and options.first_sequence is None:
            parser.error(
                f"--steps must be at least {MIN_STEPS}, not {options.steps}: the result is"
                " a median."
            )
        if options.warmup < 1:
            parser.error(
                f"--warmup must be at least 1, not {options.warmup}: the first step allocates"
                " and records."
            )
        known = TOOLKITS if options.model is None else OF_REAL_MODELS
        if unknown := [name for name in options.toolkits if name not in known]:
            parser.error(f"no toolkit is named {', '.join(unknown)}; there are {', '.join(known)}")
        if options.model is None and options.trains_like_real_models:
            parser.error(
                "--keep, --peer-keep, --lora, --layers, --fused-loss, --offload-inputs, --tile and"
                " --cp need --model."
            )
        if not options.recompute and {*options.keep, *options.peer_keep} != {None}:
            parser.error("--keep and --peer-keep say what recomputation keeps: not --no-recompute.")
        if options.float8 is not None:
            if others := [name for name in options.toolkits if name not in FLOAT8_TOOLKITS]:
                parser.error(
                    f"--float8 is an option of {' and '.join(FLOAT8_TOOLKITS)}, and not of"
                    f" {', '.join(others)}: leave these out of --toolkits."
                )
            if importlib.util.find_spec("torchao") is None:
                parser.error(
                    "--float8 needs the package torchao, which is not installed:"
                    " pip install torchao"
                )
        return options

    def cases(self) -> list[Case]:
        """Return the cases in the order in which they run: toolkit by toolkit, or batch by batch
        to interleave.
        """
        kinds = [
            (toolkit, keep)
            for toolkit in self.toolkits
            for keep in (self.keep if toolkit == OURS else self.peer_keep)
        ]
        if self.interleave:
            return [self._case(*kind, batch) for batch in self.batch for kind in kinds]
        return [self._case(*kind, batch) for kind in kinds for batch in self.batch]

    @property
    def trains_like_real_models(self) -> bool:
        """Whether an option is there that GPTs do not have."""
        given = (self.layers, self.lora, self.tile, *self.keep, *self.peer_keep)
        is_set = self.fused_loss or self.offload_inputs or self.cp > 1
        return is_set or any(each is not None for each in given)

    def _case(self, toolkit: str, keep: str | None, batch: int) -> Case:
        settings: dict[str, Any] = {
            each.name: getattr(self, each.name) for each in fields(Settings)
        }
        model = None
        if self.model is not None:
            model = RealModel(
                name=self.model, sequence=self.sequence, layers=self.layers, lora=self.lora
            )
        reduce_dtype: str | None = self.reduce_dtype
        if not issubclass(TOOLKITS[toolkit], Bmt):
            settings |= _OF_PEERS
            reduce_dtype = self.peer_reduce_dtype
        return Case(
            **settings,
            toolkit=toolkit,
            model=model,
            keep=keep,
            reduce_dtype=reduce_dtype,
            batch=batch,
        )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="torchrun --nproc_per_node=N tools/bench measure",
        description=(
            "Train the same plain torch GPT, or a model of transformers, under several toolkits"
            " and compare speed, memory and losses."
        ),
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--size", choices=SIZES, default="tiny", help="the GPT")
    add("--model", choices=CONFIGURATIONS, help="a model of transformers, in place of a GPT")
    add("--sequence", type=int, default=4096, metavar="N", help="tokens of a sequence of --model")
    add("--layers", type=int, metavar="N", help="of --model; None: as many as it has")
    add("--lora", type=int, metavar="R", help="train PEFT's adapters of rank R alone")
    add(
        "--fused-loss",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="never make the whole logits: bmt's loss, and Liger's beside FSDP2",
    )
    add(
        "--offload-inputs",
        action="store_true",
        help="keep the inputs of bmt's blocks in host memory, with --model",
    )
    add(
        "--tile",
        type=int,
        metavar="N",
        help="compute MLPs and norms of bmt's blocks in tiles of N tokens, with --model",
    )
    add(
        "--first-sequence",
        type=int,
        metavar="N",
        help="tokens of a sequence in warm-up, so that optimizer states are there before a long"
        " step; then --steps 1 is enough",
    )
    add(
        "--keep",
        type=_kept,
        default=(None,),
        metavar="WHAT[,WHAT...]",
        help="of bmt's recomputation, a case each: none, attention, attention+products, or GiB",
    )
    add(
        "--peer-keep",
        type=_kept,
        default=(None,),
        metavar="WHAT[,WHAT...]",
        help="of FSDP2's: none, attention, selective: attention and every second product, or"
        " products: attention and every product",
    )
    add(
        "--level",
        type=int,
        choices=range(4),
        default=3,
        help="ZeRO level; FSDP2 has 2 and 3",
    )
    add(
        "--recompute",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="recompute every block in backward",
    )
    add(
        "--compile", action=argparse.BooleanOptionalAction, default=False, help="compile each block"
    )
    add(
        "--tp",
        type=int,
        default=1,
        metavar="N",
        help="ranks over which bmt-tp and dtensor cut every layer",
    )
    add("--cp", type=int, default=1, metavar="N", help="ranks that share each sequence of --model")
    add("--pp", type=int, default=1, metavar="N", help="stages of the pipelines of bmt-pp")
    add(
        "--shard-size",
        type=int,
        metavar="N",
        help="ranks over which bmt and fsdp2 shard, with copies on the other ranks; None: all",
    )
    add(
        "--optimizer-shards",
        choices=["all"],
        help="shard bmt's optimizer states over all ranks, whatever --shard-size is",
    )
    add(
        "--micro-batch",
        type=int,
        default=2,
        metavar="N",
        help="sequences in a micro-batch of a pipeline",
    )
    add("--schedule", choices=SCHEDULES, default="zbv", help="of the pipelines")
    add("--batch", type=_integers, default=(1,), metavar="N[,N...]", help="sequences per rank")
    add(
        "--dtype",
        choices=DTYPES,
        default="bf16",
        help="of computation; peers keep float32 parameters",
    )
    add(
        "--float8",
        nargs="?",
        const=FLOAT8_RECIPES[0],
        choices=FLOAT8_RECIPES,
        help="of the linear layers of blocks, by torchao: the recipe; tensorwise without a name",
    )
    add(
        "--reduce-dtype",
        choices=("param", "fp32", "fp32-sum"),
        help="of bmt's gradients; None: as the engine does",
    )
    add(
        "--peer-reduce-dtype",
        choices=("param", "fp32"),
        default="param",
        help="of the peers' gradients",
    )
    add(
        "--optimizer",
        default="adam",
        metavar="NAME",
        help="of bmt, by name; peers use torch's fused AdamW",
    )
    add(
        "--overlap-forward",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="let bmt's Adam update while the next forward begins",
    )
    add(
        "--device-memory",
        type=_bytes,
        default=0,
        metavar="GIB",
        help="of each device for states of adam_offload, or auto",
    )
    add(
        "--toolkits",
        type=_names,
        default=(OURS, "fsdp2"),
        metavar="NAME[,NAME...]",
        help=f"of {', '.join(TOOLKITS)}; of --model {', '.join(OF_REAL_MODELS)}",
    )
    add(
        "--interleave",
        action="store_true",
        help="toolkits take turns at each batch, instead of one after the other",
    )
    add("--warmup", type=int, default=3, metavar="N", help="steps before those that count")
    add(
        "--steps",
        type=int,
        default=8,
        metavar="N",
        help="steps that count; the result is their median",
    )
    add("--device", choices=("cpu", "cuda"), help="None: cuda where there is one")
    add(
        "--output",
        type=Path,
        default=Path("runs/bench.jsonl"),
        metavar="FILE",
        help="records are added to it",
    )
    add(
        "--trace",
        type=Path,
        metavar="DIR",
        help="also profile two steps of each case on rank 0 into DIR",
    )
    return parser


def _integers(text: str) -> tuple[int, ...]:
    values = tuple(int(part) for part in text.split(","))
    if min(values) < 1:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a list of positive numbers such as 1,4,8"
        )
    return values


def _kept(text: str) -> tuple[str | None, ...]:
    return tuple(None if part == "none" else part for part in text.split(","))


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def _bytes(text: str) -> int | Literal["auto"]:
    return "auto" if text == "auto" else int(float(text) * 2**30)
