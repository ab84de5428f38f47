"""bmt-pp: the layers of ``models.py`` as the stages of pipelines, which a schedule of
``bmt_pipeline.train_step`` drives.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

import bmtrain as bmt
from bench.case import DTYPES, Case
from bench.ours_parallel import BmtParallel
from bench.pipelines import VARIANTS, PipelinedGPT, Setting
from bench.sequence_first import tensor_ranks
from bench.training import token_loss
from bmt_pipeline import train_step


class BmtPipelined(BmtParallel):
    """Blocks of one stage each; embeddings and head are sharded over all ranks. With ``tp``, units
    are those of bmt-tp.
    """

    name = "bmt-pp"

    def __init__(self, case: Case, device: torch.device) -> None:
        self._case = case
        self._variant = VARIANTS[f"bmt {case.schedule}"]
        setting = Setting(
            size=case.gpt,
            dtype=DTYPES[case.dtype],
            device=device,
            micro_batch=case.micro_batch,
            recompute=case.recompute,
            level=case.level,
            reduce_dtype=case.reduce_dtype,
            convert=partial(self.parallel, case=case, device=device),
        )
        self._pipeline = PipelinedGPT(
            setting, chunks=self._variant.chunks, placement=self._variant.placement
        )
        self.model = self._pipeline
        self.optimizer = self.make_optimizer(case)
        self._manager = bmt.optim.OptimManager()
        self._manager.add_optimizer(self.optimizer)

    def parallel(self, unit: nn.Module, case: Case, device: torch.device) -> nn.Module:
        """See :meth:`Bmt.parallel`."""
        return super().parallel(unit, case, device) if case.tp > 1 else unit

    def loss(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """See :meth:`Training.loss`."""
        return super().loss(logits, targets) if self._case.tp > 1 else token_loss(logits, targets)

    @classmethod
    def obstacle(cls, case: Case) -> str | None:
        """See :meth:`Training.obstacle`."""
        if case.pp == 1:
            return "not applicable: there is one stage, for lack of --pp"
        sequences = case.batch * case.pp * case.tp
        if sequences % case.micro_batch != 0:
            return (
                f"not applicable: {sequences} sequences are no micro-batches of {case.micro_batch}"
            )
        return "not measured: its blocks are not compiled" if case.compile else None

    def data_ranks(self) -> list[int]:
        """See :meth:`Training.data_ranks`. The stages are the outermost axis of the grid."""
        stage_size = bmt.world_size() // self._case.pp
        in_stage = [rank % stage_size for rank in tensor_ranks()]
        return [rank + stage_size * stage for stage in range(self._case.pp) for rank in in_stage]

    def step(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """See :meth:`Training.step`. The mean over ranks of what is returned is the loss."""
        count = len(tokens) // self._case.micro_batch
        loss = train_step(
            self._pipeline,
            self.loss,
            (tokens, targets),
            self._variant.schedule,
            count,
            manager=self._manager,
        )
        self._manager.step()
        self._manager.zero_grad()
        return loss.detach()
