"""What becomes of each field of ``transformers.TrainingArguments``: kept, done by bmt in its own
way, or refused.

A test checks that every field of the installed transformers is in exactly one of the three tables.
A field that a later version adds is refused when it is not at its default.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import transformers

from bmt_core.errors import ConfigError
from bmt_zero.keep import Choice, choice_of


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


KEPT = _names(
    """
    output_dir do_train do_eval do_predict resume_from_checkpoint local_rank seed data_seed
    full_determinism tf32 per_device_train_batch_size num_train_epochs max_steps learning_rate
    lr_scheduler_type lr_scheduler_kwargs warmup_steps optim_args weight_decay adam_beta1 adam_beta2
    adam_epsilon gradient_accumulation_steps average_tokens_across_devices label_smoothing_factor
    bf16 neftune_noise_alpha torch_empty_cache_steps use_cache logging_strategy logging_steps
    logging_first_step log_on_each_node logging_nan_inf_filter include_num_input_tokens_seen
    log_level log_level_replica disable_tqdm report_to run_name project trackio_space_id
    trackio_bucket_id trackio_static_space_id eval_strategy eval_steps eval_delay
    per_device_eval_batch_size prediction_loss_only eval_on_start eval_do_concat_batches
    eval_use_gather_object eval_accumulation_steps include_for_metrics batch_eval_metrics
    save_strategy save_steps metric_for_best_model greater_is_better ignore_data_skip
    restore_callback_states_from_checkpoint hub_token hub_private_repo hub_model_id hub_revision
    dataloader_drop_last dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers
    dataloader_prefetch_factor dataloader_multiprocessing_context dataloader_in_order
    remove_unused_columns label_names train_sampling_strategy length_column_name
    """
)
"""They mean what they mean in transformers. ``hub_*`` are those of ``push_to_hub()``."""

DONE_BY_BMT = _names(
    """
    accelerator_config activation_checkpointing activation_checkpointing_kwargs
    gradient_checkpointing gradient_checkpointing_kwargs ddp_timeout fp16 load_best_model_at_end
    max_grad_norm optim save_only_model save_total_limit use_cpu
    """
)
"""They have the same purpose. ``docs/hugging-face.md`` says how bmt does each, and which values
it refuses.
"""

_NO_WRAPPER = (
    "bmt shards the model and reduces its gradients; leave it out, and choose zero_level=0, 1, 2"
    " or 3"
)
_COMPILE = (
    "compile the layers: bmt_zero.Block(layer, compile=True) for each, before the Trainer gets"
    " the model"
)
_CAST = (
    "it would round the parameters for good; give the Trainer a model of that dtype, or"
    " set bf16=True"
)
_LIGER = "have liger patch the plain model before the Trainer gets it"
_PUSH = "call trainer.push_to_hub() on every rank when train() has returned"

REFUSED = {
    "auto_find_batch_size": (
        "other ranks would not learn that one is out of memory; set per_device_train_batch_size"
    ),
    "bf16_full_eval": _CAST,
    "ddp_backend": "bmt takes gloo for the CPU and NCCL for CUDA; leave it out",
    "ddp_broadcast_buffers": _NO_WRAPPER,
    "ddp_bucket_cap_mb": _NO_WRAPPER,
    "ddp_find_unused_parameters": "parameters without gradients need no setting here; leave it out",
    "ddp_static_graph": _NO_WRAPPER,
    "debug": (
        "its hooks expect whole parameters, and a rank has parts; use"
        " torch.autograd.set_detect_anomaly(True)"
    ),
    "deepspeed": _NO_WRAPPER,
    "enable_jit_checkpoint": "it saves by the plain Trainer's functions; set save_steps",
    "fp16_full_eval": _CAST,
    "fsdp": _NO_WRAPPER,
    "fsdp_config": _NO_WRAPPER,
    "hub_always_push": _PUSH,
    "hub_strategy": _PUSH,
    "liger_kernel_config": _LIGER,
    "optim_target_modules": "the optimizers that read it need whole parameters; leave it out",
    "parallelism_config": _NO_WRAPPER,
    "push_to_hub": _PUSH,
    "save_on_each_node": "all ranks write to one directory, which they share; leave it out",
    "skip_memory_metrics": (
        "it measures the plain Trainer's functions; leave it out, and read"
        " torch.cuda.max_memory_allocated()"
    ),
    "torch_compile": _COMPILE,
    "torch_compile_backend": _COMPILE,
    "torch_compile_mode": _COMPILE,
    "use_liger_kernel": _LIGER,
}
"""Field -> why, and what to do instead."""

_NEW = (
    "this version of bmt-hf does not know it; leave it out, or use a version of transformers that"
    " bmt-hf was tested with"
)


def check_no_refused(arguments: Any) -> None:
    """Raise :class:`ConfigError` for the first field that is refused and not at its default."""
    for field in dataclasses.fields(transformers.TrainingArguments):
        value = getattr(arguments, field.name)
        if (
            field.name in KEPT
            or field.name in DONE_BY_BMT
            or value == field.default
            or value in _same_as(field.default)
        ):
            continue
        reason = REFUSED.get(field.name, _NEW)
        raise ConfigError(f"bmt_hf.Trainer cannot keep {field.name}={value!r}: {reason}.")


def _same_as(default: object) -> tuple[object, ...]:
    """Return what transformers makes of ``default``, and what users write in its place."""
    return (None, [], {}, "", False) if default in (None, "", False) else ()


def kept_of(value: Any) -> Choice | None:
    """Return what the option ``keep`` means: that of :class:`bmt_zero.Block`, where JSON has lists.
    Raises :class:`ConfigError` for anything else.
    """
    return choice_of(tuple(value) if isinstance(value, list) else value)
