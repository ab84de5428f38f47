"""bmt-pp: the layers of ``models.py`` as the stages of pipelines, which a schedule of
``bmt_pipeline.train_step`` drives.
"""

from __future__ import annotations

import torch

import bmtrain as bmt
from bench.case import DTYPES, Case
from bench.ours import Bmt
from bench.pipelines import VARIANTS, PipelinedGPT, Setting
from bench.training import token_loss
from bmt_pipeline import train_step


class BmtPipelined(Bmt):
    """Blocks of one stage each; embeddings and head are sharded over all ranks."""

    name = "bmt-pp"

    def __init__(self, case: Case, device: torch.device) -> None:
        self._case = case
        self._variant = VARIANTS[f"bmt {case.schedule}"]
        setting = Setting(
            size=case.shape,
            dtype=DTYPES[case.dtype],
            device=device,
            micro_batch=case.micro_batch,
            recompute=case.recompute,
            level=case.level,
            reduce_dtype=case.reduce_dtype,
        )
        self._pipeline = PipelinedGPT(
            setting, chunks=self._variant.chunks, placement=self._variant.placement
        )
        self.model = self._pipeline
        self.optimizer = self.make_optimizer(case)
        self._manager = bmt.optim.OptimManager()
        self._manager.add_optimizer(self.optimizer)

    @classmethod
    def obstacle(cls, case: Case) -> str | None:
        """See :meth:`Training.obstacle`."""
        if case.pp == 1:
            return "not applicable: there is one stage, for lack of --pp"
        if case.batch * case.pp % case.micro_batch != 0:
            return (
                f"not applicable: {case.batch * case.pp} sequences are no micro-batches of"
                f" {case.micro_batch}"
            )
        return "not measured: its blocks are not compiled" if case.compile else None

    def data_ranks(self) -> list[int]:
        """See :meth:`Training.data_ranks`. The stages are the outermost axis of the grid."""
        pipelines = bmt.world_size() // self._case.pp
        return [bmt.rank() % pipelines + pipelines * stage for stage in range(self._case.pp)]

    def step(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """See :meth:`Training.step`. The mean over ranks of what is returned is the loss."""
        count = len(tokens) // self._case.micro_batch
        loss = train_step(
            self._pipeline,
            token_loss,
            (tokens, targets),
            self._variant.schedule,
            count,
            manager=self._manager,
        )
        self._manager.step()
        self._manager.zero_grad()
        return loss.detach()
