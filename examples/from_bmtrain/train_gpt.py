"""The loop of BMTrain's README: a GPT in fp16, Adam on the host, Noam's schedule, a scaled loss,
clipping; padded batches.
"""

from __future__ import annotations

import torch

import bmtrain as bmt
from small_model import BATCH, LENGTH, WORDS, Embedding, Layer, own_batch, run


class GPT(bmt.DistributedModule):
    """Words and positions (batch, length), and which positions count, to logits."""

    def __init__(self, num_layers: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.words, self.positions = Embedding(dtype=dtype), Embedding(LENGTH, dtype=dtype)
        self.layers = bmt.TransformerBlockList(
            [bmt.CheckpointBlock(Layer(dtype=dtype)) for _ in range(num_layers)]
        )

    def forward(
        self, words: torch.Tensor, positions: torch.Tensor, keep: torch.Tensor
    ) -> torch.Tensor:
        """Return logits (batch, length, words)."""
        return self.words.scores(self.layers(self.words(words) + self.positions(positions), keep))


def main(device: str | None = None, steps: int = 30) -> list[float]:
    """Train and return the global losses."""
    bmt.init_distributed(seed=0, device=device)
    model = GPT(num_layers=2, dtype=torch.half)
    bmt.init_parameters(model)  # or bmt.load(model, "checkpoint.pt")
    loss_func = torch.nn.CrossEntropyLoss(ignore_index=-100)
    optimizer = bmt.optim.AdamOffloadOptimizer(model.parameters(), weight_decay=1e-2)
    lr_scheduler = bmt.lr_scheduler.Noam(
        optimizer, start_lr=3e-2, warmup_iter=5, end_iter=1000, num_iter=0
    )
    optim_manager = bmt.optim.OptimManager(loss_scale=1024)
    optim_manager.add_optimizer(optimizer, lr_scheduler)

    lengths = torch.arange(BATCH, device=bmt.current().device) + LENGTH - BATCH + 1
    average = bmt.utils.AverageRecorder()
    losses = []
    for iteration in range(steps):
        enc_input, targets = own_batch(iteration)
        pos = torch.arange(LENGTH, device=enc_input.device).repeat(BATCH, 1)
        keep = pos < lengths[:, None]
        logits = model(enc_input, pos, keep)
        loss = loss_func(
            logits.view(BATCH * LENGTH, WORDS), targets.masked_fill(~keep, -100).flatten()
        )
        global_loss = bmt.sum_loss(loss).item()  # the mean over ranks, for the log

        optim_manager.backward(loss)
        grad_norm = optim_manager.clip_grad_norm(optimizer.param_groups, max_norm=1.0)
        optim_manager.step()
        optim_manager.zero_grad()

        average.record(global_loss)
        losses.append(global_loss)
        if iteration % 10 == 9:
            text = (
                f"iteration {iteration}: loss {average.value:.3f}, lr"
                f" {lr_scheduler.current_lr:.2e}, gradient {grad_norm:.2f}"
            )
            bmt.print_rank(text)
    bmt.shutdown()
    return losses


if __name__ == "__main__":
    run(main)
