"""The packages of bmt, as ``bmt doctor`` and error messages name them. The core imports none of
the others.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import NamedTuple

from packaging.version import Version


class Package(NamedTuple):
    """One package of bmt, which may not be installed."""

    module: str
    provides: str
    install: str
    """How to install it where bmt-core is installed."""
    offers: tuple[str, ...] = ()
    """What its plugin offers by name: commands, kernels, optimizers, communication backends."""
    advised: tuple[str, ...] = ()
    """What errors and warnings of other packages advise to use."""


# Any of these needs the program.
_COMMANDS = (
    "bmt bench",
    "bmt checkpoint",
    "bmt doctor",
    "bmt hang",
    "bmt memory",
    "bmt pipeline-plan",
    "bmt plugins",
    "bmt verify",
)
# Literal texts, which a test finds and checks. In a clone pip needs the paths of all our packages
# that are involved.
PACKAGES = {
    "bmt-checkpoint": Package(
        "bmt_checkpoint",
        "checkpoints of models and trainings: save, load, save_checkpoint, load_checkpoint,"
        " bmt checkpoint",
        "pip install ./packages/bmt-core ./packages/bmt-params ./packages/bmt-checkpoint"
        " (in a clone of bmt), or, if your index has it: pip install bmt-checkpoint",
        ("checkpoint", "dcp", "safetensors", "torch"),
        ("bmt.save", "bmt.load", "save_checkpoint", "load_checkpoint"),
    ),
    "bmt-core": Package(
        "bmt_core",
        "start, grid of ranks, collectives, plugins, choice of kernels",
        "pip install ./packages/bmt-core (in a clone of bmt), or, if your index has it: pip"
        " install bmt-core",
    ),
    "bmt-cp": Package(
        "bmt_cp",
        "long sequences: one sequence over many ranks (context parallelism),"
        " init_distributed(cp_size=...)",
        "pip install ./packages/bmt-core ./packages/bmt-params ./packages/bmt-cp"
        ' (in a clone of bmt), or, if your index has it: pip install "bmt-train[cp]"',
        advised=("bmt.cp",),
    ),
    "bmt-hf": Package(
        "bmt_hf",
        "Hugging Face's Trainer on bmt: its callbacks, logging, evaluation and arguments with"
        " sharded training",
        "pip install ./packages/bmt-core ./packages/bmt-params ./packages/bmt-checkpoint"
        " ./packages/bmt-watch ./packages/bmt-zero ./packages/bmt-optim ./packages/bmt-hf"
        ' (in a clone of bmt), or, if your index has it: pip install "bmt-train[hf]"',
    ),
    "bmt-kernels": Package(
        "bmt_kernels",
        "compiled kernels for CPU and CUDA, and the backend nccl-native; without them plain torch"
        " does the same, slower",
        "pip install ./packages/bmt-core ./packages/bmt-kernels (in a clone of bmt), or, if your"
        " index has it:"
        ' pip install "bmt-train[kernels]"',
        ("cpu", "cuda", "nccl-native"),
    ),
    "bmt-optim": Package(
        "bmt_optim",
        "OptimManager, loss scaling, clipping, Adam, Adam on the host, learning-rate schedules",
        "pip install ./packages/bmt-core ./packages/bmt-params ./packages/bmt-optim"
        ' (in a clone of bmt), or, if your index has it: pip install "bmt-train[optim]"',
        ("adam", "adam_offload", "adamw"),
        ("OptimManager", "bmt.optim"),
    ),
    "bmt-params": Package(
        "bmt_params",
        "sharded parameters, modules that read them, their initial values and state",
        "pip install ./packages/bmt-core ./packages/bmt-params (in a clone of bmt), or, if your"
        " index has it: pip install bmt-params",
    ),
    "bmt-pipeline": Package(
        "bmt_pipeline",
        "pipelines: PipelineTransformerBlockList, train_step and its schedules,"
        " init_distributed(pipe_size=...)",
        "pip install ./packages/bmt-core ./packages/bmt-params ./packages/bmt-watch"
        " ./packages/bmt-zero ./packages/bmt-pipeline"
        ' (in a clone of bmt), or, if your index has it: pip install "bmt-train[pipeline]"',
        ("pipeline-plan",),
    ),
    "bmt-testing": Package(
        "bmt_testing",
        "tests of sharded training against plain torch, bmt verify; tests on several ranks",
        "pip install ./packages/bmt-core ./packages/bmt-params ./packages/bmt-testing"
        " (in a clone of bmt), or, if your index has it: pip install bmt-testing",
        ("verify",),
    ),
    "bmt-tp": Package(
        "bmt_tp",
        "tensor parallelism: parallel linear layers and embedding, parallelize",
        "pip install ./packages/bmt-core ./packages/bmt-params ./packages/bmt-tp"
        ' (in a clone of bmt), or, if your index has it: pip install "bmt-train[tp]"',
    ),
    "bmt-train": Package(
        "bmtrain",
        "the one name for all of them: import bmtrain as bmt; the program bmt",
        "pip install ./packages/bmt-core ./packages/bmt-params ./packages/bmt-checkpoint"
        " ./packages/bmt-watch ./packages/bmtrain (in a clone of bmt), or, if your index has it:"
        " pip install bmt-train",
        ("bench", "doctor", "memory", "plugins"),
        ("bmt.", *_COMMANDS),
    ),
    "bmt-watch": Package(
        "bmt_watch",
        "calls compared between ranks: who hangs, where and why; bmt hang",
        "pip install ./packages/bmt-core ./packages/bmt-watch (in a clone of bmt), or, if your"
        " index has it: pip install bmt-watch",
        ("hang",),
    ),
    "bmt-zero": Package(
        "bmt_zero",
        "Block, TransformerBlockList, ZeRO levels, recomputation, BMTrainModelWrapper",
        "pip install ./packages/bmt-core ./packages/bmt-params ./packages/bmt-watch"
        " ./packages/bmt-zero (in a clone of bmt), or, if your index has it:"
        ' pip install "bmt-train[zero]"',
        advised=("BMTrainModelWrapper",),
    ),
}
"""By the names of the distributions."""


def install_hint(offer: str) -> str:
    """Return " " and a sentence that names the missing package with an offer called ``offer``; ""
    if there is none.
    """
    for name, package in PACKAGES.items():
        if offer in package.offers and importlib.util.find_spec(package.module) is None:
            return (
                f" {offer!r} is provided by {name}, which is not installed. Install it with:"
                f" {package.install}"
            )
    return ""


def complaint_about_versions(installed: Mapping[str, str]) -> str | None:
    """Return what is wrong with packages of bmt of these versions, by name, and what to type; None
    if all are of one version.
    """
    if len({*installed.values()}) < 2:
        return None
    newest = max(installed.values(), key=Version)
    found = ", ".join(f"{name} {version}" for name, version in sorted(installed.items()))
    others = "".join(f" {name}=={newest}" for name in sorted(installed) if name != "bmt-core")
    return (
        f"Packages of bmt are installed in several versions: {found}. They belong together in one."
        f" Type: pip install bmt-core=={newest}{others}"
    )


def advice_on_missing(text: str) -> str:
    """Return " " and sentences that say how to install what ``text`` advises to use and is not
    there; "" if all is.
    """
    return "".join(
        f" {name} is not installed: {package.install}."
        for name, package in PACKAGES.items()
        if any(advised in text for advised in package.advised)
        and package.install not in text
        and importlib.util.find_spec(package.module) is None
    )
