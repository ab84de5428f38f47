"""Models of Hugging Face between ``save_pretrained``, four ranks and ``from_pretrained``, with the
host memory that it takes.

GPT-2 and Llama of random weights, about twenty times their largest tensor. Fresh processes stream
the directory of ``save_pretrained`` into a model made on the meta device, and write a directory
that ``from_pretrained`` opens; both must be equal to the last bit. Memory is anonymous memory
(``RssAnon``), the most of any rank.

python3 tools/dev.py setup && .venv/bin/python integration-tests/hugging_face_memory.py
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import bmt_core
from bmt_checkpoint import load, save
from bmt_testing import RankPool
from bmt_zero import BMTrainModelWrapper

KINDS: dict[str, tuple[Any, Any]] = {
    "gpt2": (GPT2LMHeadModel, GPT2Config),
    "llama": (LlamaForCausalLM, LlamaConfig),
}
RANKS = 4


def main() -> int:
    """Try each model, and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--width",
        type=int,
        default=768,
        help="of the models; the default makes about 300 MB of float32",
    )
    options = parser.parse_args()
    failures = 0
    for name in KINDS:
        with tempfile.TemporaryDirectory() as folder:
            failures += not is_right(name, options.width, Path(folder))
    return 1 if failures else 0


def config_of(name: str, width: int) -> Any:
    """Return the configuration of a model whose largest tensor is about a twentieth of it."""
    if name == "gpt2":
        return GPT2Config(n_embd=width, n_layer=10, n_head=8, vocab_size=5 * width, n_positions=256)
    sizes = {
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_hidden_layers": 8,
        "vocab_size": 4 * width,
    }
    return LlamaConfig(**sizes, num_attention_heads=8, max_position_embeddings=256)


def is_right(name: str, width: int, folder: Path) -> bool:
    """Move one model there and back, and say what it took."""
    model = KINDS[name][0](config_of(name, width))
    model.save_pretrained(folder / "pretrained", max_shard_size="50MB")
    model.config.save_pretrained(folder / "ranks")
    sizes = [p.nbytes for p in model.parameters()]
    files = len(list((folder / "pretrained").glob("*.safetensors")))
    with contextlib.closing(RankPool(RANKS)) as pool:
        found = pool.run(load_and_save, name, width, str(folder), timeout=600)
    loaded = KINDS[name][0].from_pretrained(folder / "ranks")
    expected, got = model.state_dict(), loaded.state_dict()
    is_equal = expected.keys() == got.keys() and all(
        torch.equal(value, got[key]) for key, value in expected.items()
    )
    own, loading, saving = (max(figures) / 1e6 for figures in zip(*found, strict=True))
    print(
        f"{name}: {sum(sizes) / 1e6:.0f} MB in {files} files, the largest tensor"
        f" {max(sizes) / 1e6:.1f} MB. Of {RANKS} ranks, each keeps {own:.0f} MB; beyond that"
        f" loading takes {loading:.1f} MB and saving {saving:.1f} MB at most. from_pretrained"
        f" finds {'the same bits' if is_equal else 'OTHER VALUES'}.",
        flush=True,
    )
    return is_equal and loading < 3 * max(sizes) / 1e6 and saving < 3 * max(sizes) / 1e6


def load_and_save(name: str, width: int, folder: str) -> tuple[int, int, int]:
    """Return the bytes of this rank's parts, and the most memory beyond them: to make and load the
    model, and to save it.
    """
    save(nn.Linear(2, 2), f"{folder}/first/")  # what a first call imports
    load(nn.Linear(2, 2), f"{folder}/first")
    with Peak() as loading:
        with torch.device("meta"):
            model: nn.Module = KINDS[name][0](config_of(name, width))
        BMTrainModelWrapper(model, init=False)
        load(model, f"{folder}/pretrained")
    own = sum(p.nbytes for p in model.parameters())
    bmt_core.synchronize()
    with Peak() as saving:
        save(model, f"{folder}/ranks")
    return own, loading.most - own, saving.most


class Peak:
    """The most anonymous memory that is taken inside of the ``with`` statement."""

    def __enter__(self) -> Peak:
        gc.collect()
        self._before = anonymous_bytes()
        self.most = 0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._is_over.is_set():
            self.most = max(self.most, anonymous_bytes() - self._before)
            self._is_over.wait(0.0005)


def anonymous_bytes() -> int:
    """Return the anonymous memory of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


if __name__ == "__main__":
    sys.exit(main())
