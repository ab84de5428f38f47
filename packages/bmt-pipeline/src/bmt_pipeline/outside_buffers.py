"""``send_written_buffers``: what one stage writes to buffers of modules that lie on no stage.

A step runs ``before_layers`` on the first stage and ``after_layers`` on the last one, so only that
stage updates the statistics of a batch norm there. All stages get them when the step ends, because
the checkpoint has the buffers of rank 0, and a call of the model runs that code on every rank.
Where several stages write, as in a training call of the model, those of the first one win.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from bmt_core.comm.annotate import annotate
from bmt_core.comm.autograd import materialized
from bmt_params.guards.equal_values import sum_of_bits
from bmt_params.models_of_run import CallEnd
from bmt_pipeline.block_list import PipelineTransformerBlockList
from bmt_pipeline.pipeline_ranks import num_stages, own_stage, pipeline_group

# As in [Note: rank 0's buffers] in bmt_zero.written_buffers, which sees to ranks of one stage.
_OF_NORMS = ("running_mean", "running_var", "num_batches_tracked")


def send_written_buffers(module: nn.Module) -> CallEnd:
    """Return what sends, at the end of the call of ``module``, the buffers that the call has
    written to all stages. Collective over the pipeline if there are such buffers.

    One of ``ModelsOfRun.at_calls``.
    """
    buffers = [buffer for owner in _training_outside(module) for buffer in _written(owner)]
    before = [sum_of_bits(buffer) for buffer in buffers]

    def send(read: Sequence[torch.Tensor] | None) -> None:
        if read is None or not buffers:  # the call has failed
            return
        changed = [sum_of_bits(b) != old for b, old in zip(buffers, before, strict=True)]
        # The first stage gives the largest number, and one that has written nothing gives 0.
        stages, group = num_stages(), pipeline_group()
        ranking = torch.stack(changed).cpu() * (stages - own_stage())
        with annotate("to send statistics of norms and declared buffers to all stages"):
            group.all_reduce(ranking, "max").wait()
            for buffer, largest in zip(buffers, ranking.tolist(), strict=True):
                if largest:
                    sent = materialized(buffer.detach())
                    group.broadcast(sent, stages - largest).wait()
                    # By .data, as torch's norms write them: a graph may hold the buffer.
                    buffer.data.copy_(sent)

    return send


def _training_outside(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules of ``model`` in no pipelined list whose forward may write buffers."""
    lists = [m for m in model.modules() if isinstance(m, PipelineTransformerBlockList)]
    inside = {id(module) for layers in lists for module in layers.modules()}
    for module in model.modules():
        if module._buffers and id(module) not in inside and (module.training or _declared(module)):
            yield module


def _written(module: nn.Module) -> Iterator[torch.Tensor]:
    names = (*_OF_NORMS, *_declared(module))
    for name, buffer in module._buffers.items():
        if name in names and buffer is not None and buffer.layout is torch.strided:
            yield buffer


def _declared(module: nn.Module) -> tuple[str, ...]:
    names: tuple[str, ...] = inspect.getattr_static(module, "written_buffers", ())
    return names
