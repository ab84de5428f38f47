"""``TrainingArguments``: those of transformers and two of bmt's. Making them starts the run."""

from __future__ import annotations

import os
import pickle
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers

from bmt_core.errors import ConfigError
from bmt_core.run.runtime import current, init_distributed, is_initialized
from bmt_hf.argument_tables import check_no_refused, kept_of

ADAMW = ("adamw_torch", "adamw_torch_fused")
_OPTIMIZERS = (*ADAMW, "sgd", "adagrad", "rmsprop")
_RECOMPUTATION_OPTIONS = {"use_reentrant": (False,), "offload": (False,)}


@dataclass
class TrainingArguments(transformers.TrainingArguments):  # type: ignore[misc]
    """``transformers.TrainingArguments`` for :class:`bmt_hf.Trainer`. Making them starts the run,
    if none is under way.

    So make them first, and the model after: seeded by ``seed``, every rank then draws the same
    first values. For settings of the run that are not here, call ``bmt_core.init_distributed(...)``
    before. An argument that bmt cannot keep raises :class:`ConfigError` with what to do instead:
    see :mod:`bmt_hf.argument_tables`.

    ``zero_level`` (0 to 3) says what is sharded: nothing, optimizer states, also gradients, also
    parameters. By default it is the level of the run, which is 3 if this starts it.
    ``offload_optimizer`` keeps AdamW's states and masters in host memory.
    """

    zero_level: int | None = field(
        default=None,
        metadata={
            "help": (
                "ZeRO level: 0 shards nothing, 1 optimizer states, 2 also gradients, 3 (the"
                " default) also parameters."
            ),
            "choices": [0, 1, 2, 3],
        },
    )
    offload_optimizer: bool = field(
        default=False,
        metadata={"help": "Keep the states of AdamW in host memory, and update them there."},
    )

    def __post_init__(self) -> None:
        check_no_refused(self)
        _check_environment()
        _start_run(self)
        super().__post_init__()
        _check_values(self)
        _check_process(self)

    @property
    def n_gpu(self) -> int:
        """The number of this process's GPUs: 1, or 0 on the CPU. A run of one rank uses one,
        however many there are.
        """
        return min(int(super().n_gpu), 1)

    @property
    def place_model_on_device(self) -> bool:
        """Whether transformers moves the model: no, wrapping puts each rank's part on
        its device.
        """
        return False


def _check_environment() -> None:
    """Refuse what ``accelerate launch`` was configured to do to the model."""
    for name in ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_DYNAMO_BACKEND"):
        value = os.environ.get(name, "no")
        if value.lower() not in ("", "no", "false", "0"):
            raise ConfigError(
                f"{name}={value} has accelerate wrap or compile the model, which bmt shards itself."
                " Start with torchrun, or unset it."
            )


def _start_run(arguments: Any) -> None:
    """Start the run unless the program has; refuse what contradicts it."""
    if not is_initialized():
        init_distributed(
            seed=arguments.seed,
            zero_level=arguments.zero_level,
            device="cpu" if arguments.use_cpu else None,
            timeout=arguments.ddp_timeout,
            # So that loss.backward() in a training_step of the user's own is right.
            gradients="mean",
        )
    runtime = current()
    level = runtime.settings.zero_level
    if arguments.zero_level not in (None, level):
        raise ConfigError(
            f"zero_level={arguments.zero_level}, and the run was started with level {level}. Leave"
            " zero_level out, or give it to init_distributed()."
        )
    is_on_cpu = runtime.device.type == "cpu"
    if arguments.use_cpu and not is_on_cpu:
        raise ConfigError(
            f"use_cpu=True, and the run was started on {runtime.device}. Leave use_cpu out, or call"
            ' init_distributed(device="cpu").'
        )
    arguments.use_cpu = is_on_cpu
    others = runtime.topology.other_axes
    if others:
        raise ConfigError(
            f"bmt_hf.Trainer gives every rank other data, and this run has the axes {others}"
            " beside. Start it without them, or write the loop yourself, as"
            " docs/hugging-face.md shows."
        )
    _show_ranks_to_accelerate()


def _show_ranks_to_accelerate() -> None:
    """Set what torchrun sets, which is all that accelerate reads, where another launcher started
    the ranks.
    """
    launch = current().launch
    if launch.world_size > 1:
        os.environ.setdefault("RANK", str(launch.rank))
        os.environ.setdefault("WORLD_SIZE", str(launch.world_size))
        os.environ.setdefault("LOCAL_RANK", str(launch.local_rank))
        os.environ.setdefault("LOCAL_WORLD_SIZE", str(launch.local_world_size))


def _check_values(arguments: Any) -> None:
    optimizer = arguments.optim.value
    if optimizer not in _OPTIMIZERS:
        raise ConfigError(
            f"bmt_hf.Trainer cannot make optim={optimizer!r}; it knows {', '.join(_OPTIMIZERS)}."
            " Give any other elementwise optimizer as optimizers=(optimizer, None), made of the"
            " model's parameters."
        )
    if arguments.offload_optimizer and optimizer not in ADAMW:
        raise ConfigError(
            f"offload_optimizer=True needs optim='adamw_torch', and optim is {optimizer!r}."
        )
    if arguments.mixed_precision not in ("no", "bf16", "fp16"):
        raise ConfigError(
            f"Mixed precision is {arguments.mixed_precision!r}, from ACCELERATE_MIXED_PRECISION;"
            " bmt_hf.Trainer knows bf16 and fp16. Unset it, and set bf16=True."
        )
    for name, value in (arguments.activation_checkpointing_kwargs or {}).items():
        if name == "keep":
            _check_keep(value, arguments.activation_checkpointing)
        elif name != "every_n_layers" and value not in _RECOMPUTATION_OPTIONS.get(name, ()):
            raise ConfigError(
                f"activation_checkpointing_kwargs has {name}={value!r}. Blocks recompute without"
                " reentrance and without offload, and know every_n_layers and keep; leave the"
                " rest out."
            )
    config = arguments.accelerator_config
    if not config.even_batches or config.gradient_accumulation_kwargs:
        raise ConfigError(
            f"accelerator_config has even_batches={config.even_batches} and"
            f" gradient_accumulation_kwargs={config.gradient_accumulation_kwargs}. All ranks need"
            " the same number of batches, and zero_level decides when gradients are reduced: leave"
            " both out."
        )
    if config.split_batches:
        raise ConfigError(
            "accelerator_config has split_batches=True, with which transformers weights the last"
            " batch of an evaluation as if it had more rows than the others. Leave it out, and"
            " divide per_device_train_batch_size and per_device_eval_batch_size by the ranks."
        )
    if arguments.eval_use_gather_object and arguments.eval_do_concat_batches:
        raise ConfigError(
            "eval_use_gather_object=True gathers lists of rows, and eval_do_concat_batches=True"
            " drops some of them. Leave one of them out: eval_do_concat_batches=False."
        )
    if arguments.save_only_model and arguments.load_best_model_at_end:
        raise ConfigError(
            "save_only_model=True leaves out what load_best_model_at_end=True reads. Leave one of"
            " them out."
        )


def _check_process(arguments: Any) -> None:
    """Raise if accelerate takes this process for another one, as when an Accelerator was
    made before.
    """
    runtime = current()
    # Without the index of cpu:0.
    device = torch.device("cpu") if arguments.device.type == "cpu" else arguments.device
    found = arguments.process_index, arguments.world_size, device
    if found != (runtime.rank, runtime.world_size, runtime.device):
        raise ConfigError(
            f"accelerate takes this process for rank {found[0]} of {found[1]} on {found[2]}, and it"
            f" is rank {runtime.rank} of {runtime.world_size} on {runtime.device}. Make no"
            " Accelerator before, and unset variables that begin with ACCELERATE_."
        )


def _check_keep(value: Any, recomputes: bool) -> None:
    kept_of(value)
    if not recomputes:
        raise ConfigError(
            f"activation_checkpointing_kwargs has keep={value!r}, which says what recomputation"
            " keeps, and nothing is recomputed: set gradient_checkpointing=True, or leave out keep."
        )
    try:
        pickle.dumps(value)
    except Exception as error:
        raise ConfigError(
            f"activation_checkpointing_kwargs has keep={value!r}, which cannot be saved with the"
            f" arguments: {error}. Give a function at the top level of a module."
        ) from error
