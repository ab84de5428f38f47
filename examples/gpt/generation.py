"""Text that a model makes up."""

from __future__ import annotations

import torch

import bmtrain as bmt
from text import SEPARATOR


@torch.no_grad()
def generate(
    model: torch.nn.Module,
    prompt: bytes,
    *,
    length: int,
    context: int,
    temperature: float = 0.8,
    seed: int = 0,
) -> bytes:
    """Continue ``prompt`` by ``length`` bytes, each drawn from the model's distribution given the
    ``context`` bytes before.

    Every rank makes the same calls and draws the same bytes, because blocks of ZeRO level 3 need
    all ranks in every forward, and the stages of a pipeline need each other. Collective.
    """
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    text = list(prompt or SEPARATOR)
    was_training = model.training
    model.eval()
    for _ in range(length):
        read = text[-context:]
        # The last position does not read those after it, so what the sequence is padded with does
        # not matter.
        padding = [0] * (-len(read) % bmt.config["tp_size"])
        inputs = torch.tensor([read + padding], device=device)
        positions = torch.arange(inputs.shape[1], device=device)[None]
        logits = model(inputs, positions)[0, len(read) - 1]
        logits = bmt.distributed.all_gather(logits, bmt.config["tp_comm"]).flatten().float().cpu()
        chances = torch.softmax(logits / temperature, dim=-1)
        text.append(int(torch.multinomial(chances, 1, generator=generator)))
    model.train(was_training)
    return bytes(text)


def printable(text: bytes) -> str:
    r"""Return ``text`` for a terminal: what is no printable character becomes U+FFFD.

    >>> printable(b"if a:\n\x1b[2J")
    'if a:\n�[2J'
    """
    decoded = text.decode("utf-8", errors="replace")
    return "".join(
        character if character.isprintable() or character == "\n" else "�" for character in decoded
    )
