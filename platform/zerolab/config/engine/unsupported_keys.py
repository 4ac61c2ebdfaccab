"""Keys of DeepSpeed that have no counterpart here, and what to do instead.

A refused key that is off is accepted, for that is what happens anyway. Which values mean off is
said for each key: ``{}`` turns ZenFlow on and asks for no quantized weights.
"""

from collections.abc import Mapping
from typing import Any

from zerolab.config.unsupported import BLOCK, EMPTY, NOTHING, SWITCH, Off, Refused, values

__all__ = ["ALIASES", "REFUSED", "without_aliases"]

_SECONDARY = (
    "there is no second copy of the weights; set mics_shard_size, which shards all states over so "
    "many ranks"
)
_ONE_GATHER = "a block is gathered in one collective over mics_shard_size ranks; remove it"
_COMPILED = "set compile.enabled"
_ACTIVATIONS = "set activation_checkpointing.cpu_checkpointing"
_WIDE = "communication is not compressed; set communication_data_type to bf16"
_TRIM = "prune or quantize the trained model after `export`"
_SAMPLER = "give the DataLoader a sampler of your own"
_TOO_LARGE = "use stage 3 for a model that does not fit on one device"
_FULL_MASTERS = (
    "master weights are fp32; to save memory raise zero_optimization.stage or set "
    "data_types.grad_accum_dtype"
)


def _asks_nowhere(value: Any) -> bool:
    if isinstance(value, Mapping):
        return value.get("enabled", False) is False and all(
            _asks_nowhere(inner) for inner in value.values() if isinstance(inner, Mapping)
        )
    return value is False


_NOWHERE_ENABLED = Off("`false`, without `enabled: true` at any depth", _asks_nowhere)


def _is_undivided(value: Any) -> bool:
    return value in ({}, {"tp_size": 1})


_AUTO_TP = "set tensor_parallel.size alone to the number of ranks; plan 'auto' asks the model"
_PLAN = "map names of layers to styles in tensor_parallel.plan"

REFUSED: dict[str, Refused] = {
    # Blocks of their own. Those that have no "enabled" are on as soon as they are there.
    "amp": Refused("set bf16.enabled or fp16.enabled", BLOCK),
    "autotuning": Refused(
        "search over the keys with an experiment: hyperparameters.overwrite_deepspeed_args takes "
        "search spaces",
        BLOCK,
    ),
    "comet": Refused("set comet.enabled to false, and log to it from your own code", BLOCK),
    "wandb": Refused("set wandb.enabled to false, and log to it from your own code", BLOCK),
    "comms_config": Refused("set comms_logger, which is the key that DeepSpeed reads", NOTHING),
    "compression_training": Refused(_TRIM, _NOWHERE_ENABLED),
    "curriculum_learning": Refused(_SAMPLER, BLOCK),
    "data_efficiency": Refused(_SAMPLER, BLOCK),
    "datastates_ckpt": Refused("set checkpoint.writer.decoupled", SWITCH),
    "eigenvalue": Refused(_TRIM, BLOCK),
    "elasticity": Refused(
        "checkpoints load at any world size: set resources.slots_per_trial", BLOCK
    ),
    "expert_parallel": Refused(
        "use stage 3, which shards experts with the rest of the model", BLOCK
    ),
    "fp8": Refused("the engine computes in fp32, fp16 or bf16: set bf16.enabled", BLOCK),
    "hybrid_engine": Refused(
        "set hybrid_engine.enabled to false: the model's own generate() runs at every stage", BLOCK
    ),
    "monitor_config": Refused(
        "set tensorboard or csv_monitor, which are the keys that DeepSpeed reads", NOTHING
    ),
    "nebula": Refused("set checkpoint.writer.decoupled", BLOCK),
    "progressive_layer_drop": Refused("drop layers in the model's own forward()", BLOCK),
    "quantize_training": Refused(_TRIM, BLOCK),
    "sparse_attention": Refused("use torch's scaled_dot_product_attention in the model", SWITCH),
    "torch_autocast": Refused(
        "set bf16.enabled, or enter torch.autocast in the model's forward()", BLOCK
    ),
    "weight_quantization": Refused(_TRIM, EMPTY),
    "zenflow": Refused("set zero_optimization.offload_optimizer.device", SWITCH),
    # Single keys.
    "data_parallel_size": Refused(
        "the data-parallel size follows from the number of ranks; remove it", NOTHING
    ),
    "disable_allgather": Refused("remove it; updated weights must reach every rank", SWITCH),
    "disable_python_gc": Refused("call gc.disable() in the trial's __init__", SWITCH),
    "enable_cuda_graph": Refused(
        "set compile.enabled, and compile.mode to reduce-overhead", SWITCH
    ),
    "graph_harvesting": Refused(_COMPILED, SWITCH),
    "max_grad_norm": Refused("set gradient_clipping", values([0, 0.0])),
    "pipeline_parallel_size": Refused("set pipeline.stages", values([1])),
    "seq_parallel_communication_data_type": Refused(
        "sequence parallelism is not supported; remove it", values(["fp32"])
    ),
    "sequence_parallel_size": Refused(
        "sequence parallelism is not supported; remove it or set 1", values([1])
    ),
    "sparse_gradients": Refused("gradients are dense; remove it", SWITCH),
    "use_data_before_expert_parallelism": Refused(
        "there are no expert-parallel groups; remove it", SWITCH
    ),
    # Tensor parallelism.
    "tensor_parallel.autotp_size": Refused(_AUTO_TP, values([0, 1])),
    "tensor_parallel.tp": Refused(_AUTO_TP, Off("`{}`, `tp_size` 1", _is_undivided)),
    "tensor_parallel.enabled": Refused(_AUTO_TP, values([False])),
    "tensor_parallel.preset_model": Refused(_PLAN, NOTHING),
    "tensor_parallel.partition_config": Refused(_PLAN, EMPTY),
    "tensor_parallel.tp_overlap_comm": Refused(
        "remove it; a layer's sum is needed by the next layer at once", SWITCH
    ),
    # Precision.
    "fp16.fp16_master_weights_and_grads": Refused(_FULL_MASTERS, SWITCH),
    "bf16.bf16_master_weights_and_grads": Refused(_FULL_MASTERS, SWITCH),
    "bf16.bf16_optimizer_states": Refused(
        "optimizer states are fp32; offload them with zero_optimization.offload_optimizer", SWITCH
    ),
    "data_types.buffer_dtype": Refused("buffers keep their type; cast them in the model", NOTHING),
    "data_types.keep_in_fp32_modules": Refused(
        "keep the whole model in fp32, or cast in its forward()", values([[]])
    ),
    # Checkpoints.
    "checkpoint.use_node_local_storage": Refused(
        "remove it; checkpoints go to one directory that all ranks see", SWITCH
    ),
    # Zero.
    "zero_optimization.zenflow": Refused("set zero_optimization.offload_optimizer.device", SWITCH),
    "zero_optimization.cpu_offload": Refused(
        'set zero_optimization.offload_optimizer: {"device": "cpu"}', SWITCH
    ),
    "zero_optimization.cpu_offload_param": Refused(
        'set zero_optimization.offload_param: {"device": "cpu"}', SWITCH
    ),
    "zero_optimization.offload_parameters": Refused(
        'set zero_optimization.offload_param: {"device": "cpu"}', SWITCH
    ),
    "zero_optimization.cpu_offload_use_pin_memory": Refused(
        "set pin_memory inside zero_optimization.offload_optimizer or offload_param", SWITCH
    ),
    "zero_optimization.legacy_stage1": Refused("remove it; there is one stage 1", SWITCH),
    "zero_optimization.grad_hooks": Refused(
        "remove it; gradients are always taken by hooks", values([True])
    ),
    "zero_optimization.zero_hpz_partition_size": Refused(_SECONDARY, values([0, 1])),
    "zero_optimization.zero_quantized_weights": Refused(_WIDE, SWITCH),
    "zero_optimization.zero_quantized_nontrainable_weights": Refused(_WIDE, SWITCH),
    "zero_optimization.zero_quantized_gradients": Refused(_WIDE, SWITCH),
    "zero_optimization.zeropp_loco_param": Refused(_WIDE, SWITCH),
    "zero_optimization.mics_hierarchical_params_gather": Refused(_ONE_GATHER, SWITCH),
    "zero_optimization.offload_optimizer.super_offload": Refused("set device to cpu", SWITCH),
    # DeepSpeed's compiler; what only tunes it asks for nothing by itself.
    "compile.deepcompile": Refused(_COMPILED, SWITCH),
    "compile.passes": Refused(_COMPILED, values([[]])),
    "compile.autoep_non_moe": Refused(_COMPILED, SWITCH),
    "compile.free_activation": Refused("set activation_checkpointing.enabled", SWITCH),
    "compile.free_activation_threshold": Refused(
        "set activation_checkpointing.enabled", values([10_485_760])
    ),
    "compile.offload_activation": Refused(_ACTIVATIONS, SWITCH),
    "compile.offload_activation_pin_memory": Refused(_ACTIVATIONS, values([True, False])),
    "compile.offload_opt_states": Refused("set zero_optimization.offload_optimizer.device", SWITCH),
    "compile.offload_parameters": Refused("set zero_optimization.offload_param.device", SWITCH),
    "compile.double_buffer": Refused(_COMPILED, values([True, False])),
    "compile.symmetric_memory": Refused(_COMPILED, SWITCH),
    "compile.debug_log": Refused("set the environment variable TORCH_LOGS", SWITCH),
    "compile.sync_before_reduce": Refused(_COMPILED, SWITCH),
    "compile.sync_after_reduce": Refused(_COMPILED, SWITCH),
    "compile.sync_before_allgather": Refused(_COMPILED, SWITCH),
    "compile.sync_after_allgather": Refused(_COMPILED, SWITCH),
    "compile.keep_int_input_tensors": Refused(_COMPILED, values([True, False])),
    "compile.keep_all_input_tensors": Refused(_COMPILED, SWITCH),
}
"""By dotted key. What is off is what DeepSpeed's own reading of the key takes for off."""

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
