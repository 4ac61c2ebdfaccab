"""Keys of DeepSpeed that have no counterpart here, and what to do instead.

A refused key that says "off" (false, null, an empty block, ``enabled: false``) is accepted, for
that is what happens anyway.
"""

from collections.abc import Collection, Mapping
from typing import Any

__all__ = ["ALIASES", "REFUSED", "take_refused", "without_aliases"]

_MICS = "use stage 3 over all ranks"
_COMPILED = "set compile.enabled"
_WIDE = "communication is not compressed; set communication_data_type to bf16"
_ONE_AXIS = "the data-parallel size follows from the number of ranks; remove it"
_TRIM = "prune or quantize the trained model after `export`"

REFUSED: dict[str, str] = {
    "amp": "set bf16.enabled or fp16.enabled",
    "autotuning": "search over the keys with an experiment: hyperparameters."
    "overwrite_deepspeed_args takes search spaces",
    "comet": "log to it from a trial callback",
    "wandb": "log to it from a trial callback",
    "compression_training": _TRIM,
    "curriculum_learning": "give the DataLoader a sampler of your own",
    "data_efficiency": "give the DataLoader a sampler of your own",
    "data_parallel_size": _ONE_AXIS,
    "datastates_ckpt": "set checkpoint.writer.decoupled",
    "disable_allgather": "remove it; updated weights must reach every rank",
    "disable_python_gc": "call gc.disable() in the trial's __init__",
    "eigenvalue": _TRIM,
    "elasticity": "checkpoints load at any world size: set resources.slots_per_trial",
    "expert_parallel": "use stage 3, which shards experts with the rest of the model",
    "graph_harvesting": _COMPILED,
    "hybrid_engine": "export the weights and generate with an inference server",
    "nebula": "set checkpoint.writer.decoupled",
    "pipeline": "use stage 3 for a model that does not fit on one device",
    "progressive_layer_drop": "drop layers in the model's own forward()",
    "quantize_training": _TRIM,
    "seq_parallel_communication_data_type": "sequence parallelism is not supported; remove it",
    "sequence_parallel_size": "sequence parallelism is not supported; remove it or set 1",
    "sparse_attention": "use torch's scaled_dot_product_attention in the model",
    "sparse_gradients": "gradients are dense; remove it",
    "tensor_parallel": "use stage 3 for a model that does not fit on one device",
    "torch_autocast": "set bf16.enabled, or enter torch.autocast in the model's forward()",
    "use_data_before_expert_parallelism": "there are no expert-parallel groups; remove it",
    "weight_quantization": _TRIM,
    "zenflow": "set zero_optimization.offload_optimizer.device",
    "fp16.fp16_master_weights_and_grads": "master weights are fp32; to save memory raise "
    "zero_optimization.stage or set data_types.grad_accum_dtype",
    "bf16.bf16_master_weights_and_grads": "master weights are fp32; to save memory raise "
    "zero_optimization.stage or set data_types.grad_accum_dtype",
    "bf16.bf16_optimizer_states": "optimizer states are fp32; offload them with "
    "zero_optimization.offload_optimizer",
    "data_types.buffer_dtype": "buffers keep their type; cast them in the model",
    "data_types.keep_in_fp32_modules": "keep the whole model in fp32, or cast in its forward()",
    "checkpoint.use_node_local_storage": "remove it; checkpoints go to one directory that all "
    "ranks see",
    "zero_optimization.zenflow": "set zero_optimization.offload_optimizer.device",
    "zero_optimization.cpu_offload": 'set zero_optimization.offload_optimizer: {"device": "cpu"}',
    "zero_optimization.cpu_offload_param": 'set zero_optimization.offload_param: {"device": "cpu"}',
    "zero_optimization.cpu_offload_use_pin_memory": "set pin_memory inside "
    "zero_optimization.offload_optimizer or offload_param",
    "zero_optimization.legacy_stage1": "remove it; there is one stage 1",
    "zero_optimization.grad_hooks": "remove it; gradients are always taken by hooks",
    "zero_optimization.zero_hpz_partition_size": _MICS,
    "zero_optimization.zero_quantized_weights": _WIDE,
    "zero_optimization.zero_quantized_nontrainable_weights": _WIDE,
    "zero_optimization.zero_quantized_gradients": _WIDE,
    "zero_optimization.zeropp_loco_param": _WIDE,
    "zero_optimization.mics_shard_size": _MICS,
    "zero_optimization.mics_hierarchical_params_gather": _MICS,
    "zero_optimization.offload_optimizer.super_offload": "set device to cpu",
    "compile.deepcompile": _COMPILED,
    "compile.passes": _COMPILED,
    "compile.autoep_non_moe": _COMPILED,
    "compile.free_activation": "set activation_checkpointing.enabled",
    "compile.free_activation_threshold": "set activation_checkpointing.enabled",
    "compile.offload_activation": "set activation_checkpointing.cpu_checkpointing",
    "compile.offload_activation_pin_memory": "set activation_checkpointing.cpu_checkpointing",
    "compile.offload_opt_states": "set zero_optimization.offload_optimizer.device",
    "compile.offload_parameters": "set zero_optimization.offload_param.device",
    "compile.double_buffer": _COMPILED,
    "compile.symmetric_memory": _COMPILED,
    "compile.debug_log": "set the environment variable TORCH_LOGS",
    "compile.sync_before_reduce": _COMPILED,
    "compile.sync_after_reduce": _COMPILED,
    "compile.sync_before_allgather": _COMPILED,
    "compile.sync_after_allgather": _COMPILED,
    "compile.keep_int_input_tensors": _COMPILED,
    "compile.keep_all_input_tensors": _COMPILED,
}
"""Dotted key to what the user should do instead."""

_OFF: dict[str, Any] = {
    "managed_gradient_accumulation": True,
    "sequence_parallel_size": 1,
    "zero_optimization.zero_hpz_partition_size": 1,
}
"""Values beside the usual ones that mean off."""

ALIASES: dict[str, str] = {
    f"zero_optimization.{name}": f"zero_optimization.stage3_{name}"
    for name in (
        "prefetch_bucket_size",
        "param_persistence_threshold",
        "model_persistence_threshold",
        "max_live_parameters",
        "max_reuse_distance",
        "gather_16bit_weights_on_model_save",
        "module_granularity_threshold",
        "use_all_reduce_for_fetch_params",
        "allgather_sequential",
    )
} | {
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": (
        "zero_optimization.stage3_gather_16bit_weights_on_model_save"
    )
}
"""Second names of keys."""

REFUSED["managed_gradient_accumulation"] = (
    "set gradient_accumulation_steps, or call engine.set_gradient_accumulation_boundary()"
)


def _is_off(key: str, value: Any) -> bool:
    if value is None or value is False or (isinstance(value, Mapping | list | str) and not value):
        return True
    if isinstance(value, Mapping):
        return value.get("enabled") is False
    return key in _OFF and value == _OFF[key]


def take_refused(
    data: Mapping[str, Any], table: Mapping[str, str], opaque: Collection[str]
) -> tuple[dict[str, Any], list[str], list[str]]:
    """Part a file from the keys that have no counterpart here.

    Args:
        data: The file.
        table: Dotted key to what to do instead.
        opaque: Dotted keys whose content is the user's own.

    Returns:
        The file without them, one problem for each that is on, and the keys that are off.
    """
    problems: list[str] = []
    off: list[str] = []

    def take(block: Mapping[str, Any], prefix: str) -> dict[str, Any]:
        rest: dict[str, Any] = {}
        for name, value in block.items():
            key = f"{prefix}{name}"
            if key not in table:
                inside = isinstance(value, Mapping) and key not in opaque
                rest[name] = take(value, f"{key}.") if inside else value
            elif _is_off(key, value):
                off.append(key)
            else:
                problems.append(f"{key}: is not supported; {table[key]}")
        return rest

    return take(data, ""), problems, off


def without_aliases(data: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Write keys under their first names; both names at once are a problem."""
    problems: list[str] = []
    zero = data.get("zero_optimization")
    if not isinstance(zero, Mapping):
        return dict(data), problems
    renamed: dict[str, Any] = {}
    for name, value in zero.items():
        key = f"zero_optimization.{name}"
        first = ALIASES.get(key, key)
        short = first.removeprefix("zero_optimization.")
        if first != key and short in zero:
            problems.append(f"{key}: is a second name of {first}; give one of the two")
        else:
            renamed[short] = value
    return {**data, "zero_optimization": renamed}, problems
