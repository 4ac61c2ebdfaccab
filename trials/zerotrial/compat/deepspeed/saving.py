"""Lets libraries save what stands for an engine of DeepSpeed.

``model.save_pretrained(folder, is_main_process=False, state_dict=None)`` is what scripts for
Accelerate do on the other ranks. At stage 3 transformers would then ask this engine's shards for
what all ranks must gather together, and the main one, which has its weights, never comes.

Lightning's Fabric looks for engines among the modules of a state; ours is none.
"""

import functools
from types import ModuleType
from typing import Any

from zerolab.errors import ConfigError
from zerotrial.compat import after_import

__all__ = ["is_sharded", "patch_when_imported"]

_MISSING = (
    "state_dict: must be given at stage 3, where each rank has a part of the weights, got None; "
    "call accelerator.get_state_dict(model) on every rank, and give it here"
)

_SHARDS = (
    "state_dict: must have whole weights, got this rank's shards, such as model.state_dict() has "
    "at stage 3; call trainer.save_model(folder) or accelerator.get_state_dict(model) on every "
    "rank, with stage3_gather_16bit_weights_on_model_save: true in the engine file"
)


def patch_when_imported() -> None:
    """Change the modules now, where they are there already, or as they are imported."""
    after_import.patch_when_imported(
        {
            "transformers.modeling_utils": _patch,
            "lightning.fabric.strategies.deepspeed": _patch_fabric,
            "lightning_fabric.strategies.deepspeed": _patch_fabric,
        }
    )


def _patch(module: ModuleType) -> None:
    original = module.PreTrainedModel.save_pretrained

    @functools.wraps(original)
    def save_pretrained(
        self: Any,
        save_directory: Any,
        is_main_process: bool = True,  # noqa: FBT001, FBT002 - transformers' order
        state_dict: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if state_dict is None and is_sharded(self):
            if is_main_process:
                raise ConfigError("save_pretrained()", [_MISSING])
            state_dict = {}
        elif is_main_process and _has_shards(state_dict):
            raise ConfigError("save_pretrained()", [_SHARDS])
        return original(self, save_directory, is_main_process, state_dict, *args, **kwargs)

    module.PreTrainedModel.save_pretrained = save_pretrained


def _has_shards(state_dict: dict[str, Any] | None) -> bool:
    from torch.distributed.tensor import DTensor

    return any(isinstance(value, DTensor) for value in (state_dict or {}).values())


def is_sharded(model: Any) -> bool:
    """Whether an engine of stage 3 has a model."""
    from torch.distributed.fsdp import FSDPModule

    return any(isinstance(module, FSDPModule) for module in model.modules())


def _patch_fabric(module: ModuleType) -> None:
    from zerotrial.engine.engine import Engine

    def engines_of(state: dict[str, Any]) -> list[Engine]:
        return [value for value in state.values() if isinstance(value, Engine)]

    module._get_deepspeed_engines_from_state = engines_of  # type: ignore[attr-defined] # noqa: SLF001 - the place that has no public name
