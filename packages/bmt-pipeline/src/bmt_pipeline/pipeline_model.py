"""``PipelineModel``: a model with separate methods for the code before and after its
pipelined layers.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from bmt_core.errors import ConfigError
from bmt_params.modules.distributed_module import DistributedModule
from bmt_pipeline.block_list import PipelineTransformerBlockList
from bmt_pipeline.payload import as_tuple


class PipelineModel(DistributedModule):
    """A model that :func:`train_step` can run: a :class:`PipelineTransformerBlockList`, and the
    code before and after it.

    Called as usual, it is an ordinary model: every rank runs :meth:`before_layers` and
    :meth:`after_layers` on its own batch. :func:`train_step` runs the former on the first stage and
    the latter on the last one. Their parameters belong to no stage: they are sharded over all
    ranks, so a weight that both use, such as a tied embedding, is one parameter with one gradient::

        class GPT(PipelineModel):
            def __init__(self):
                super().__init__()
                self.embedding = Embedding(...)
                self.layers = PipelineTransformerBlockList([lambda: Layer(...) for _ in range(40)])

            def before_layers(self, ids):
                return self.embedding(ids)

            def after_layers(self, hidden):
                return hidden @ self.embedding.weight.t()
    """

    @abstractmethod
    def before_layers(self, *inputs: Any) -> Any:
        """Return the arguments of the list of layers: a tensor, or a tuple of
        positional arguments.
        """
        raise NotImplementedError

    @abstractmethod
    def after_layers(self, *hidden: Any) -> Any:
        """Return the model's output, computed from the hidden states after the last layer."""
        raise NotImplementedError

    def forward(self, *inputs: Any) -> Any:
        """Run the whole model on this rank's batch, by GPipe if there are several stages."""
        made = self.pipelined_layers()(*as_tuple(self.before_layers(*inputs)))
        return self.after_layers(*as_tuple(made))

    def pipelined_layers(self) -> PipelineTransformerBlockList:
        """Return the list of layers that the model holds; :class:`ConfigError` if there is not
        exactly one.
        """
        found = [
            module for module in self.modules() if isinstance(module, PipelineTransformerBlockList)
        ]
        if len(found) != 1:
            raise ConfigError(
                "A PipelineModel must hold exactly one PipelineTransformerBlockList, but"
                f" {type(self).__name__} holds {len(found)}."
            )
        return found[0]
