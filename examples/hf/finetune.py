"""Fine-tune a causal language model of Hugging Face with LoRA, sharded over all ranks; evaluate it,
let it write, export it.

# A tiny model with random weights, without a network:
torchrun --nproc_per_node=2 finetune.py
# A real one, by name or directory:
torchrun --nproc_per_node=8 finetune.py --model Qwen/Qwen3-8B --dtype bfloat16
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    PreTrainedTokenizerFast,
)

import bmtrain as bmt


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Run as told by the command line. Return the held-out loss before and after."""
    options = parser().parse_args(arguments)
    bmt.init_distributed(seed=options.seed, device=options.device, zero_level=options.zero_level)
    model, tokenizer = adapted_model(options)
    train, held_out = windows(options, tokenizer, bmt.world_size())
    adapters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = build_optimizer(options.optimizer, adapters, options.lr)
    manager = bmt.optim.OptimManager()
    manager.add_optimizer(
        optimizer,
        bmt.lr_scheduler.Cosine(optimizer, options.lr, options.steps // 10, options.steps),
    )

    before = evaluate(model, held_out, options)
    own = torch.Generator().manual_seed(options.seed + bmt.rank())  # every rank draws other windows
    model.train()
    for step in range(options.steps):
        batch = train[torch.randint(len(train), (options.batch_size,), generator=own)].to(
            bmt.current().device
        )
        loss = model(input_ids=batch, labels=batch).loss
        manager.backward(loss)
        manager.clip_grad_norm(optimizer.param_groups, max_norm=1.0)
        manager.step()
        # Here, and not before backward: the next forward then has the gradients' memory.
        manager.zero_grad()
        if step % 10 == 9:
            bmt.print_rank(f"step {step + 1}: loss {bmt.mean_loss(loss).item():.3f}")
    after = evaluate(model, held_out, options)

    prompt = tokenizer(options.prompt, return_tensors="pt").to(bmt.current().device)
    # All ranks write the same.
    written = model.generate(**prompt, max_new_tokens=options.new_tokens)
    bmt.print_rank(tokenizer.decode(written[0], skip_special_tokens=True))

    merged = model.merge_and_unload()
    # Every rank writes its share, in Hugging Face's layout.
    bmt.save(merged, f"{options.out}/", tokenizer=tokenizer)
    bmt.print_rank(
        f"held-out loss {before:.3f} -> {after:.3f};"
        f" AutoModelForCausalLM.from_pretrained({str(options.out)!r})"
    )
    bmt.shutdown()
    return {"before": before, "after": after}


def build_optimizer(
    name: str, adapters: list[torch.nn.Parameter], lr: float
) -> torch.optim.Optimizer:
    """Return Adam, or Muon, for adapters. All of them are matrices, as Muon needs; each is stepped
    whole, on one rank.
    """
    if name == "adam":
        return bmt.optim.AdamOptimizer(adapters, lr=lr)
    # Updates as large as those of Adam, for which the default of --lr is.
    return bmt.optim.whole(
        torch.optim.Muon, adapters, lr=lr, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"
    )


def adapted_model(options: argparse.Namespace) -> tuple[Any, Any]:
    """Return the model with its adapters, and the tokenizer. No rank ever holds more than its part
    and one layer.
    """
    if options.model is None:
        tokenizer = byte_tokenizer()
        sizes = {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
        }
        config: Any = LlamaConfig(
            vocab_size=len(tokenizer), pad_token_id=0, bos_token_id=0, eos_token_id=0, **sizes
        )
    else:
        files = options.model if Path(options.model).is_dir() else snapshot_download(options.model)
        tokenizer, config = AutoTokenizer.from_pretrained(files), AutoConfig.from_pretrained(files)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, options.dtype))
    bmt.BMTrainModelWrapper(model, init=options.model is None)
    if options.model is not None:
        bmt.load(model, files)
    lora = LoraConfig(
        r=options.rank,
        lora_alpha=2 * options.rank,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(model, lora)
    if not options.checkpoint:
        model.activation_checkpointing_disable()
    if bmt.rank() == 0:
        model.print_trainable_parameters()
    return model, tokenizer


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer whose words are bytes, after the one that ends a text."""
    alphabet = ["<end>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(
        models.BPE(vocab={word: index for index, word in enumerate(alphabet)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>")


def windows(
    options: argparse.Namespace, tokenizer: Any, ranks: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the text as windows (count, length) of tokens: those to train on, and the last tenth,
    which is held out.
    """
    ids = torch.tensor(tokenizer(options.data.read_text())["input_ids"])
    rows = ids[: len(ids) // options.length * options.length].view(-1, options.length)
    held_out = max(len(rows) // 10, ranks)
    if len(rows) <= held_out:
        raise ValueError(
            f"{options.data} has {len(ids)} tokens, which are {len(rows)} windows of --length"
            f" {options.length}. {ranks} ranks need {held_out + 1} or more: give a longer text or a"
            " shorter --length."
        )
    return rows[:-held_out], rows[-held_out:]


@torch.no_grad()
def evaluate(model: Any, held_out: torch.Tensor, options: argparse.Namespace) -> float:
    """Return the mean loss of windows that no rank trains on; each rank has some of them."""
    model.eval()
    count = min(len(held_out) // bmt.world_size(), 8 * options.batch_size)
    own = held_out[bmt.rank() * count :][:count].to(bmt.current().device)
    sums = [
        model(input_ids=part, labels=part, num_items_in_batch=1).loss
        for part in torch.split(own, options.batch_size)
    ]
    return bmt.mean_loss(sum(sums), count=own[:, 1:].numel()).item()


def parser() -> argparse.ArgumentParser:
    """Return the options."""
    made = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    made.add_argument(
        "--model",
        help="name on the Hugging Face hub, or directory (default: a tiny one with random weights)",
    )
    made.add_argument(
        "--data",
        type=Path,
        default=Path(os.__file__),
        help="text to learn (default: a file of Python's)",
    )
    made.add_argument(
        "--out",
        type=Path,
        default=Path("runs/hf"),
        help="directory of the merged model (default: %(default)s)",
    )
    made.add_argument(
        "--prompt", default="def ", help="beginning of the text that is written at the end"
    )
    made.add_argument("--steps", type=int, default=60)
    made.add_argument(
        "--batch-size", type=int, default=4, help="windows per rank (default: %(default)s)"
    )
    made.add_argument(
        "--length", type=int, default=128, help="tokens of a window (default: %(default)s)"
    )
    made.add_argument("--new-tokens", type=int, default=40)
    made.add_argument("--rank", type=int, default=8, help="of the adapters (default: %(default)s)")
    made.add_argument("--optimizer", choices=("adam", "muon"), default="adam")
    made.add_argument("--lr", type=float, default=1e-2)
    made.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    made.add_argument(
        "--zero-level",
        type=int,
        choices=range(4),
        default=3,
        help="2 gathers less often than 3, the default",
    )
    made.add_argument(
        "--no-checkpoint",
        dest="checkpoint",
        action="store_false",
        help="keep activations, do not recompute",
    )
    made.add_argument(
        "--traceback",
        action="store_true",
        help="show where an error came from, not only what it says",
    )
    made.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if there is one")
    made.add_argument("--seed", type=int, default=0)
    return made


def run() -> None:
    """Run :func:`main`, and end with one line where the user, a file or the installation has to
    be mended.
    """
    try:
        main()
    except (bmt.BmtError, ValueError, OSError) as error:
        if "--traceback" in sys.argv:
            raise
        sys.exit(f"finetune.py, rank {os.environ.get('RANK', 0)}: {type(error).__name__}: {error}")


if __name__ == "__main__":
    run()
