"""Unsupported keys of DeepSpeed, and their replacements.

An unsupported key that is off is accepted because it changes nothing. The values that turn a key
off differ: ``{}`` turns ZenFlow on, but requests no quantized weights.
"""

from collections.abc import Mapping
from typing import Any

from zerolab.extensions.config_checks.unsupported import (
    BLOCK,
    EMPTY,
    NEVER_OFF,
    SWITCH,
    OffValues,
    UnsupportedKey,
    values,
)

__all__ = ["ALIASES", "UNSUPPORTED_KEYS", "without_aliases"]

_SECONDARY = (
    "there is no second copy of the weights; set mics_shard_size, which shards all states over "
    "that many ranks"
)
_ONE_GATHER = "a block is gathered in one collective over mics_shard_size ranks; remove it"
_COMPILED = "set compile.enabled"
_ACTIVATIONS = "set activation_checkpointing.cpu_checkpointing"
_WIDE = "communication is not compressed; set communication_data_type to bf16"
_TRIM = "prune or quantize the trained model after `export`"
_SAMPLER = "pass your own sampler to the DataLoader"
_TOO_LARGE = "use stage 3 for a model that does not fit on one device"
_FULL_MASTERS = (
    "master weights are fp32; to save memory raise zero_optimization.stage or set "
    "data_types.grad_accum_dtype"
)


def _is_disabled_everywhere(value: Any) -> bool:
    if isinstance(value, Mapping):
        return value.get("enabled", False) is False and all(
            _is_disabled_everywhere(inner) for inner in value.values() if isinstance(inner, Mapping)
        )
    return value is False


_DISABLED_EVERYWHERE = OffValues(
    "`false`, without `enabled: true` at any depth", _is_disabled_everywhere
)


def _is_undivided(value: Any) -> bool:
    return value in ({}, {"tp_size": 1})


_AUTO_TP = "set tensor_parallel.size alone to the number of ranks; plan 'auto' asks the model"
_PLAN = "map names of layers to styles in tensor_parallel.plan"

UNSUPPORTED_KEYS: dict[str, UnsupportedKey] = {
    # Blocks. A block without "enabled" is on whenever it is present.
    "amp": UnsupportedKey("set bf16.enabled or fp16.enabled", BLOCK),
    "autotuning": UnsupportedKey(
        "set autotuning.enabled to false for training; `zerolab autotune` reads the block in "
        "either case",
        BLOCK,
    ),
    "comet": UnsupportedKey("set comet.enabled to false, and log to it from your own code", BLOCK),
    "wandb": UnsupportedKey("set wandb.enabled to false, and log to it from your own code", BLOCK),
    "comms_config": UnsupportedKey(
        "set comms_logger, which is the key that DeepSpeed reads", NEVER_OFF
    ),
    "compression_training": UnsupportedKey(_TRIM, _DISABLED_EVERYWHERE),
    "curriculum_learning": UnsupportedKey(_SAMPLER, BLOCK),
    "data_efficiency": UnsupportedKey(_SAMPLER, BLOCK),
    "datastates_ckpt": UnsupportedKey("set checkpoint.writer.decoupled", SWITCH),
    "eigenvalue": UnsupportedKey(_TRIM, BLOCK),
    "elasticity": UnsupportedKey(
        "checkpoints load at any world size: set resources.slots_per_trial", BLOCK
    ),
    "expert_parallel": UnsupportedKey(
        "set tensor_parallel.size, which divides the experts of models of transformers, or use "
        "stage 3, which shards them with the rest of the model",
        BLOCK,
    ),
    "fp8": UnsupportedKey("the engine computes in fp32, fp16 or bf16: set bf16.enabled", BLOCK),
    "hybrid_engine": UnsupportedKey(
        "set hybrid_engine.enabled to false: the model's own generate() runs at every stage", BLOCK
    ),
    "monitor_config": UnsupportedKey(
        "set tensorboard or csv_monitor, which are the keys that DeepSpeed reads", NEVER_OFF
    ),
    "nebula": UnsupportedKey("set checkpoint.writer.decoupled", BLOCK),
    "progressive_layer_drop": UnsupportedKey("drop layers in the model's own forward()", BLOCK),
    "quantize_training": UnsupportedKey(_TRIM, BLOCK),
    "sparse_attention": UnsupportedKey(
        "use torch's scaled_dot_product_attention in the model", SWITCH
    ),
    "torch_autocast": UnsupportedKey(
        "set bf16.enabled, or enter torch.autocast in the model's forward()", BLOCK
    ),
    "weight_quantization": UnsupportedKey(_TRIM, EMPTY),
    "zenflow": UnsupportedKey("set zero_optimization.offload_optimizer.device", SWITCH),
    # Single keys.
    "data_parallel_size": UnsupportedKey(
        "the data-parallel size follows from the number of ranks; remove it", NEVER_OFF
    ),
    "disable_allgather": UnsupportedKey("remove it; updated weights must reach every rank", SWITCH),
    "disable_python_gc": UnsupportedKey("call gc.disable() in the trial's __init__", SWITCH),
    "enable_cuda_graph": UnsupportedKey(
        "set compile.enabled, and compile.mode to reduce-overhead", SWITCH
    ),
    "graph_harvesting": UnsupportedKey(_COMPILED, SWITCH),
    "max_grad_norm": UnsupportedKey("set gradient_clipping", values([0, 0.0])),
    "pipeline_parallel_size": UnsupportedKey("set pipeline.stages", values([1])),
    "seq_parallel_communication_data_type": UnsupportedKey(
        "tokens are exchanged in the type of the model; remove it", values(["fp32"])
    ),
    "sparse_gradients": UnsupportedKey("gradients are dense; remove it", SWITCH),
    "use_data_before_expert_parallelism": UnsupportedKey(
        "there are no expert-parallel groups; remove it", SWITCH
    ),
    # Tensor parallelism.
    "tensor_parallel.autotp_size": UnsupportedKey(_AUTO_TP, values([0, 1])),
    "tensor_parallel.tp": UnsupportedKey(_AUTO_TP, OffValues("`{}`, `tp_size` 1", _is_undivided)),
    "tensor_parallel.enabled": UnsupportedKey(_AUTO_TP, values([False])),
    "tensor_parallel.preset_model": UnsupportedKey(_PLAN, NEVER_OFF),
    "tensor_parallel.partition_config": UnsupportedKey(_PLAN, EMPTY),
    "tensor_parallel.tp_overlap_comm": UnsupportedKey(
        "remove it; a layer's sum is needed by the next layer at once", SWITCH
    ),
    # Precision.
    "fp16.fp16_master_weights_and_grads": UnsupportedKey(_FULL_MASTERS, SWITCH),
    "bf16.bf16_master_weights_and_grads": UnsupportedKey(_FULL_MASTERS, SWITCH),
    "bf16.bf16_optimizer_states": UnsupportedKey(
        "optimizer states are fp32; offload them with zero_optimization.offload_optimizer", SWITCH
    ),
    "data_types.buffer_dtype": UnsupportedKey(
        "buffers keep their type; cast them in the model", NEVER_OFF
    ),
    "data_types.keep_in_fp32_modules": UnsupportedKey(
        "keep the whole model in fp32, or cast in its forward()", values([[]])
    ),
    # Checkpoints.
    "checkpoint.use_node_local_storage": UnsupportedKey(
        "remove it; checkpoints go to one directory that all ranks see", SWITCH
    ),
    # Zero.
    "zero_optimization.zenflow": UnsupportedKey(
        "set zero_optimization.offload_optimizer.device", SWITCH
    ),
    "zero_optimization.cpu_offload": UnsupportedKey(
        'set zero_optimization.offload_optimizer: {"device": "cpu"}', SWITCH
    ),
    "zero_optimization.cpu_offload_param": UnsupportedKey(
        'set zero_optimization.offload_param: {"device": "cpu"}', SWITCH
    ),
    "zero_optimization.offload_parameters": UnsupportedKey(
        'set zero_optimization.offload_param: {"device": "cpu"}', SWITCH
    ),
    "zero_optimization.cpu_offload_use_pin_memory": UnsupportedKey(
        "set pin_memory inside zero_optimization.offload_optimizer or offload_param", SWITCH
    ),
    "zero_optimization.legacy_stage1": UnsupportedKey("remove it; there is one stage 1", SWITCH),
    "zero_optimization.grad_hooks": UnsupportedKey(
        "remove it; gradients are always taken by hooks", values([True])
    ),
    "zero_optimization.zero_hpz_partition_size": UnsupportedKey(_SECONDARY, values([0, 1])),
    "zero_optimization.zero_quantized_weights": UnsupportedKey(_WIDE, SWITCH),
    "zero_optimization.zero_quantized_nontrainable_weights": UnsupportedKey(_WIDE, SWITCH),
    "zero_optimization.zero_quantized_gradients": UnsupportedKey(_WIDE, SWITCH),
    "zero_optimization.zeropp_loco_param": UnsupportedKey(_WIDE, SWITCH),
    "zero_optimization.mics_hierarchical_params_gather": UnsupportedKey(_ONE_GATHER, SWITCH),
    "zero_optimization.offload_optimizer.super_offload": UnsupportedKey(
        "set device to cpu", SWITCH
    ),
    # DeepSpeed's compiler; keys that only tune it request nothing by themselves.
    "compile.deepcompile": UnsupportedKey(_COMPILED, SWITCH),
    "compile.passes": UnsupportedKey(_COMPILED, values([[]])),
    "compile.autoep_non_moe": UnsupportedKey(_COMPILED, SWITCH),
    "compile.free_activation": UnsupportedKey("set activation_checkpointing.enabled", SWITCH),
    "compile.free_activation_threshold": UnsupportedKey(
        "set activation_checkpointing.enabled", values([10_485_760])
    ),
    "compile.offload_activation": UnsupportedKey(_ACTIVATIONS, SWITCH),
    "compile.offload_activation_pin_memory": UnsupportedKey(_ACTIVATIONS, values([True, False])),
    "compile.offload_opt_states": UnsupportedKey(
        "set zero_optimization.offload_optimizer.device", SWITCH
    ),
    "compile.offload_parameters": UnsupportedKey(
        "set zero_optimization.offload_param.device", SWITCH
    ),
    "compile.double_buffer": UnsupportedKey(_COMPILED, values([True, False])),
    "compile.symmetric_memory": UnsupportedKey(_COMPILED, SWITCH),
    "compile.debug_log": UnsupportedKey("set the environment variable TORCH_LOGS", SWITCH),
    "compile.sync_before_reduce": UnsupportedKey(_COMPILED, SWITCH),
    "compile.sync_after_reduce": UnsupportedKey(_COMPILED, SWITCH),
    "compile.sync_before_allgather": UnsupportedKey(_COMPILED, SWITCH),
    "compile.sync_after_allgather": UnsupportedKey(_COMPILED, SWITCH),
    "compile.keep_int_input_tensors": UnsupportedKey(_COMPILED, values([True, False])),
    "compile.keep_all_input_tensors": UnsupportedKey(_COMPILED, SWITCH),
}
"""Unsupported keys by dotted key. A value is off if DeepSpeed treats it as off."""

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
"""Aliases of keys."""


def without_aliases(data: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Replace aliases by canonical keys; both names at once are a problem."""
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
            problems.append(f"{key}: is an alias of {first}; set one of the two")
        else:
            renamed[short] = value
    return {**data, "zero_optimization": renamed}, problems
