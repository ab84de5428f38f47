"""``memory_of``: the memory of one rank in a step of training, by formulas, without torch.

A peak is the largest of three moments. After the forward, a rank holds weights, optimizer states,
what layers keep for backward, and the logits with their gradients. In the backward of the last
layer the logits are gone, and that layer's activations are there. At the end of backward, what
layers kept is gone, and all gradients are there.

Left out: the CUDA context, the communication library, and what the allocator loses to
fragmentation, together some 2 to 4 GiB of a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil
from typing import NamedTuple

from bmt_core.errors import ConfigError
from bmtrain._program.model_shape import ModelShape

KEEPS = ("none", "attention", "products", "attention+products", "all")
"""What recomputation keeps, from least to most. "all" is ``use_checkpoint=False``."""


@dataclass(frozen=True, kw_only=True)
class BytesEach:
    """Bytes per parameter that is trained (``docs/memory.md``)."""

    weight: int
    gradient: int
    master: int
    moments: int = 8


BFLOAT16 = BytesEach(weight=2, gradient=2, master=2)
"""With bmt-kernels: weight and master share the float32 value (``compact_master``)."""
BFLOAT16_TORCH = BytesEach(weight=2, gradient=2, master=4)
"""Without bmt-kernels on the device: a float32 master of its own."""
FLOAT32 = BytesEach(weight=4, gradient=4, master=0)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How a model is trained. ``batch`` is the sequences of one micro-batch on each rank, or on
    each group of ``tp`` x ``cp`` ranks, which shares them.
    """

    gpus: int
    sequence: int
    batch: int = 1
    micro_batches: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    level: int = 3
    keep: str | int = "none"
    """One of :data:`KEEPS`, or bytes on each rank."""
    offload_inputs: bool = False
    """Whether inputs of layers wait for backward on the host: ``Block(offload_inputs=True)``."""
    offload: bool = False
    """Whether masters and moments are on the host: ``AdamOffloadOptimizer``."""
    shard_size: int | None = None
    """Ranks that share one copy; None: all along ``dp``."""
    shards_states_over_all: bool = False
    """``optimizer_shards="all"``."""
    lora: int | None = None
    """The rank of float32 adapters, which alone are trained."""
    fused_loss: bool = False
    """Whether the loss makes no whole logits: ``use_linear_cross_entropy``."""
    compiled: bool = False
    """Whether Blocks are compiled: ``Block(compile=True)``."""
    each: BytesEach = BFLOAT16

    def __post_init__(self) -> None:
        if self.gpus % (self.tp * self.pp * self.cp):
            raise ConfigError(
                f"{self.gpus} GPUs are not a multiple of tp={self.tp} x pp={self.pp} x"
                f" cp={self.cp}. Change one of these."
            )
        if self.offload_inputs and self.compiled:
            raise ConfigError("Compiled Blocks keep their inputs on the GPU: see offload_inputs.")

    @property
    def data_ranks(self) -> int:
        """Ranks along ``dp`` and ``cp``."""
        return self.gpus // (self.tp * self.pp)

    @property
    def shard(self) -> int:
        """Ranks over which the layers' weights of a stage are sharded."""
        return min((self.shard_size or self.data_ranks) * self.cp, self.data_ranks)

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch whose hidden states one rank has: with ``tp``, its rows
        (Korthikanti et al. 2022, section 4.2.2), and with ``cp`` its part of each sequence.
        """
        return ceil(self.batch * self.sequence / (self.tp * self.cp))

    @property
    def loss_tokens(self) -> int:
        """Tokens of a micro-batch whose logits one rank has."""
        return ceil(self.batch * self.sequence / self.cp)

    @property
    def live(self) -> int:
        """Micro-batches whose activations the first stage holds: as many as stages, under 1F1B
        (Narayanan et al. 2021, section 2.2.1).
        """
        return min(self.pp, self.micro_batches)


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of one rank, part by part. Not all parts are there at once: see :attr:`at`."""

    parameters: float
    masters: float
    moments: float
    gradients: float
    """Those that the optimizer reads."""
    gathered: float
    in_flight: float
    """Whole gradients, before they are reduced."""
    kept: float
    layer: float
    logits: float
    host: float
    at: dict[str, float]
    """The sum at each moment that can be the peak."""

    @property
    def peak(self) -> float:
        """The largest memory of the step."""
        return max(self.at.values())


def memory_of(model: ModelShape, setting: Setting) -> Memory:
    """Return the memory of one rank; of a pipeline, of the rank that has most.

    Level 2 frees a layer's weights after its backward, so that the last moment is as at level 3.
    The sums of a pipeline are replaced by the reduced gradients, and where nothing is reduced all
    gradients are the optimizer's.
    """
    held = states(model, setting)
    held = held._replace(host=held.host + inputs_on_host(model, setting))
    gathered, in_flight = gathered_weights(model, setting), gradients_in_flight(model, setting)
    kept, layer = kept_activations(model, setting), layer_activations(model, setting)
    loss = logits(model, setting)
    always = held.parameters + held.masters + held.moments
    at_end = replace(setting, level=3) if setting.level == 2 else setting
    is_reduced = setting.shard > 1 and setting.level > 0
    gradients_at_end = held.gradients + (in_flight if is_reduced else 0.0)
    if setting.pp > 1:
        gradients_at_end = in_flight
    elif setting.micro_batches > 1:  # those of earlier micro-batches are there all the time
        always += held.gradients
        gradients_at_end -= held.gradients
    return Memory(
        **held._asdict(),
        gathered=gathered,
        in_flight=in_flight,
        kept=kept,
        layer=layer,
        logits=loss,
        at={
            "loss": always + gathered + kept + loss,
            "start of backward": always + gathered + kept + layer + in_flight,
            "end of backward": always + gathered_weights(model, at_end) + layer + gradients_at_end,
        },
    )


def stage_parameters(model: ModelShape, setting: Setting) -> float:
    """Parameters of the layers of one stage, of one rank along ``tp``."""
    return ceil(model.layers / setting.pp) * model.block / setting.tp


class States(NamedTuple):
    """Bytes of what a rank holds between steps, and of gradients at the end of backward."""

    parameters: float
    masters: float
    moments: float
    gradients: float
    host: float


def states(model: ModelShape, setting: Setting) -> States:
    """Return the bytes of states: each of N ranks holds 1/N of them, at level 0 all of them
    (Rajbhandari et al. 2020, section 3).

    From the second micro-batch on, gradients of two bytes are summed in four (the note "gradient
    accumulation" in ``bmt_params/gradient_sum.py``). With LoRA, float32 adapters are trained, and
    all else is frozen. ``AdamOffloadOptimizer`` holds masters, moments and gradients in host memory
    (``docs/memory.md``).
    """
    is_whole = setting.level == 0
    over = 1 if is_whole else setting.shard
    over_all = setting.shards_states_over_all and not is_whole
    of_layers = stage_parameters(model, setting)
    # What is outside of layers belongs to no stage and is sharded over all ranks.
    held = of_layers + model.outside / (setting.tp * setting.pp)
    each, trained = setting.each, held / (setting.data_ranks if over_all else over)
    parameters = each.weight * trained
    if over_all:  # the layers' shards in each copy, beside those of the optimizer
        parameters += each.weight * of_layers / over
    if setting.lora is not None:
        each = FLOAT32
        trained = model.with_adapters(setting.lora) / (setting.tp * setting.pp * over)
        parameters += each.weight * trained
    sums = 4 if setting.micro_batches > 1 and each.gradient == 2 else 0
    away = trained if setting.offload else 0.0
    on_host = each.master + each.moments + (4 if each.master else 8)
    return States(
        parameters=parameters,
        masters=each.master * (trained - away),
        moments=each.moments * (trained - away),
        gradients=(each.gradient + sums) * trained,
        host=on_host * away,
    )


def gathered_weights(model: ModelShape, setting: Setting) -> float:
    """Return the bytes of whole weights beside a rank's shards.

    Level 3 has two layers at a time, levels 1 and 2 have all; what is outside of layers is
    whole during a step. A pipeline keeps its stage whole at every level (``docs/pipelines.md``).
    """
    weight, layers = setting.each.weight, stage_parameters(model, setting)
    outside = weight * model.outside / setting.tp
    if setting.shard == 1 or setting.level == 0:
        return outside if setting.pp > 1 else 0.0
    if setting.pp > 1 or setting.level < 3:
        return weight * layers + outside
    return min(2, model.layers) * weight * model.block / setting.tp + outside


def gradients_in_flight(model: ModelShape, setting: Setting) -> float:
    """Return the bytes of gradients that are not reduced yet: those of two layers, and of what is
    outside. A pipeline sums its stage's in float32, or keeps what they are computed from.
    """
    if setting.lora is not None:
        return 0.0
    outside = setting.each.gradient * model.outside / setting.tp
    if setting.pp > 1:
        return outside + _sum_of_stage(model, setting)
    if setting.shard == 1 or setting.level == 0:  # whole gradients are the optimizer's
        return outside
    return outside + min(2, model.layers) * setting.each.gradient * model.block / setting.tp


def _sum_of_stage(model: ModelShape, setting: Setting) -> float:
    """The float32 sum of a stage's gradients, and inputs and output gradients of linear layers
    whose weight gradients wait: at most half of that sum, or one and a half times it and no sum
    (``docs/pipelines.md``).
    """
    total = 4 * stage_parameters(model, setting)
    layers = ceil(model.layers / setting.pp)
    waiting = 2 * sum(map(sum, model.linears)) * setting.tokens * layers
    if waiting * setting.micro_batches <= 1.5 * total:
        return waiting * setting.micro_batches
    return total + total / 2 // waiting * waiting


def kept_activations(model: ModelShape, setting: Setting) -> float:
    """Return the bytes that layers keep from forward until backward: their inputs (Chen et al.
    2016), and what ``keep`` says; a budget takes no more than all products and attention. Products
    of tensor-parallel layers are not kept (``docs/choosing.md``).
    """
    layers = ceil(model.layers / setting.pp) * setting.live * setting.tokens
    width = setting.each.weight
    if setting.keep == "all":
        return layers * saved_bytes(model, setting)
    kept = setting.keep
    more = min(kept, most_kept(model, setting)) if isinstance(kept, int) else 0
    if isinstance(kept, str) and "attention" in kept:
        more += layers * width * model.attention
    if isinstance(kept, str) and "products" in kept and setting.tp == 1:
        more += layers * width * sum(outputs for _, outputs in model.linears)
    inputs = layers * width * model.hidden
    return inputs - inputs_on_host(model, setting) + more


def inputs_on_host(model: ModelShape, setting: Setting) -> float:
    """Return the bytes of layers' inputs that wait on the host: all but those of two layers."""
    if not setting.offload_inputs or setting.keep == "all":
        return 0.0
    inputs = ceil(model.layers / setting.pp) * setting.live
    return max(0, inputs - 2) * setting.tokens * setting.each.weight * model.hidden


def most_kept(model: ModelShape, setting: Setting) -> int:
    """Return the bytes of all products and all attention: no budget takes more."""
    both = replace(setting, keep="attention+products")
    return int(
        kept_activations(model, both) - kept_activations(model, replace(setting, keep="none"))
    )


def saved_bytes(model: ModelShape, setting: Setting) -> int:
    """Return the bytes that autograd saves of one layer for one token: inputs and outputs of its
    linear layers, and unless they are compiled, of norms and activation functions.

    For a GPT this gives 32 bytes per feature, where Korthikanti et al. 2022, section 4.1, count 34
    with dropout. Fused attention does not save the matrix of scores (Dao et al. 2022).
    """
    others = 0 if setting.compiled else model.elementwise
    return setting.each.weight * (sum(map(sum, model.linears)) + others)


def layer_activations(model: ModelShape, setting: Setting) -> float:
    """Return the bytes of the layer that is computed in backward: what it saves and has not kept,
    two gradients of its widest activation, and with ``cp`` queries, keys, values and results that
    were exchanged, and two of them on their way (not measured on GPUs yet).
    """
    layers = ceil(model.layers / setting.pp) * setting.live
    kept = kept_activations(model, replace(setting, offload_inputs=False)) / layers
    width = setting.each.weight
    again = setting.tokens * (saved_bytes(model, setting) + width * model.hidden) - kept
    widest = max(max(pair) for pair in model.linears)
    exchanged = 6 * setting.tokens * width * model.attention if setting.cp > 1 else 0
    return max(0.0, again) + 2 * setting.tokens * width * widest + exchanged


def logits(model: ModelShape, setting: Setting) -> float:
    """Return the bytes of the loss: log-probabilities and two gradients of them, in float32
    (``log_softmax`` and ``nll_loss`` of torch); nothing with a loss in chunks.
    """
    return 0.0 if setting.fused_loss else 12.0 * setting.loss_tokens * model.vocabulary
