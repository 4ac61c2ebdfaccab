"""Settings of FSDP as Accelerate passes them on, converted to DeepSpeed's variables."""

from collections.abc import Mapping
from typing import Any

from zerolab.errors import ConfigError

__all__ = [
    "DEEPSPEED_VARIABLES",
    "FSDP_KEYS",
    "deepspeed_variables_of_fsdp",
    "variables_of_sharding",
]

DEEPSPEED_VARIABLES = {
    "zero_stage": "ACCELERATE_DEEPSPEED_ZERO_STAGE",
    "gradient_accumulation_steps": "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
    "gradient_clipping": "ACCELERATE_GRADIENT_CLIPPING",
    "offload_optimizer_device": "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE",
    "offload_param_device": "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE",
    "offload_optimizer_nvme_path": "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH",
    "zero3_init_flag": "ACCELERATE_DEEPSPEED_ZERO3_INIT",
    "zero3_save_16bit_model": "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL",
    "deepspeed_config_file": "ACCELERATE_DEEPSPEED_CONFIG_FILE",
}
"""Variables in which ``accelerate launch`` passes on keys of ``deepspeed_config``."""
_STAGES = {
    "FULL_SHARD": 3, "1": 3, "TRUE": 3, "HYBRID_SHARD": 3, "4": 3,
    "SHARD_GRAD_OP": 2, "2": 2, "FALSE": 2, "HYBRID_SHARD_ZERO2": 2, "5": 2,
    "NO_SHARD": 0, "3": 0,
}  # fmt: skip
"""ZeRO stage for each sharding strategy of FSDP."""
FSDP_KEYS = {"fsdp_version", "fsdp_sharding_strategy", "fsdp_reshard_after_forward"}
FSDP_KEYS |= {"fsdp_offload_params", "fsdp_state_dict_type"}


def variables_of_sharding(fsdp: dict[str, Any], problems: list[str]) -> dict[str, str]:
    """Convert settings of FSDP to DeepSpeed's variables."""
    newer = str(fsdp.get("fsdp_version", 1)) == "2"
    key = "fsdp_reshard_after_forward" if newer else "fsdp_sharding_strategy"
    strategy = str(fsdp.get(key, "FULL_SHARD")).upper()
    stage = _STAGES.get(strategy)
    if stage is None:
        choices = "FULL_SHARD, SHARD_GRAD_OP or NO_SHARD"
        problems.append(f"fsdp_config.{key}: must be {choices}, got {fsdp[key]!r}")
        return {}
    away = "cpu" if fsdp.get("fsdp_offload_params") else "none"
    return {
        DEEPSPEED_VARIABLES["zero_stage"]: str(stage),
        DEEPSPEED_VARIABLES["offload_optimizer_device"]: away if stage else "none",
        DEEPSPEED_VARIABLES["offload_param_device"]: away if stage == 3 else "none",
        DEEPSPEED_VARIABLES[
            "zero3_save_16bit_model"
        ]: "true",  # FSDP's get_state_dict() is unsharded, too
    }


def deepspeed_variables_of_fsdp(environment: Mapping[str, str]) -> dict[str, str]:
    """Convert FSDP's variables of ``accelerate launch`` to DeepSpeed's.

    Args:
        environment: Environment of a process that it started.

    Returns:
        Variables to set.

    Raises:
        ConfigError: If the settings match no stage.
    """
    settings: dict[str, Any] = {
        key: environment[key.upper()] for key in FSDP_KEYS if key.upper() in environment
    }
    settings["fsdp_offload_params"] = settings.get("fsdp_offload_params") == "true"
    problems: list[str] = []
    variables = variables_of_sharding(settings, problems)
    if problems:
        raise ConfigError("accelerate launch", problems)
    return {"ACCELERATE_USE_FSDP": "false", "ACCELERATE_USE_DEEPSPEED": "true"} | variables
