"""Saves models of stage 3 through the calls of transformers, peft and Lightning.

``save_pretrained(folder)`` without a state dict gathers the weights, if all ranks make the call;
so does peft's ``get_peft_model_state_dict(model)``. A script may also gather them itself, by
``accelerator.get_state_dict(model)``, and give them on rank 0, and None on the others.

Lightning's Fabric looks for engines among the modules of a state; ours is none.
"""

import functools
import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from zerolab.errors import ConfigError
from zerotrial.extensions import after_import

__all__ = ["is_sharded", "patch_when_imported"]

_MISSING = (
    "state_dict: must be given for a model that is only in part one of an engine's at stage 3, got "
    "None; gather it within deepspeed.zero.GatheredParameters"
)

_SHARDS = (
    "state_dict: must have whole weights, got this rank's shards, such as model.state_dict() has "
    "at stage 3; call trainer.save_model(folder) or accelerator.get_state_dict(model) on every "
    "rank, with stage3_gather_16bit_weights_on_model_save: true in the engine file"
)


def patch_when_imported() -> None:
    """Patch the modules now if they are imported already, else on import."""
    after_import.patch_when_imported(
        {
            "transformers.modeling_utils": _patch,
            "peft.utils.save_and_load": _patch_peft_function,
            "peft.peft_model": _patch_peft_model,
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
            state_dict = _gathered(self, "save_pretrained", is_main_process=is_main_process)
            is_main_process = is_main_process and bool(state_dict)
        elif is_main_process and _has_shards(state_dict):
            raise ConfigError("save_pretrained()", [_SHARDS])
        return original(self, save_directory, is_main_process, state_dict, *args, **kwargs)

    module.PreTrainedModel.save_pretrained = save_pretrained


def _gathered(model: Any, call: str, *, is_main_process: bool = True) -> dict[str, Any]:
    """Gather a model's weights by its own names; on ranks other than 0 nothing. **Collective**."""
    from zerotrial.extensions.deepspeed_api.engine import DeepSpeedEngine
    from zerotrial.extensions.deepspeed_api.parameter_access import engine_of

    engine, prefix = engine_of(model) or (None, "")
    if not isinstance(engine, DeepSpeedEngine):
        raise ConfigError(f"{call}()", [_MISSING])
    state = engine.state_for_saving(call, is_main_process=is_main_process)
    return {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}


def _patch_peft_model(module: ModuleType) -> None:
    original = module.PeftModel.save_pretrained
    signature = inspect.signature(original)

    @functools.wraps(original)
    def save_pretrained(self: Any, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("state_dict") is None and is_sharded(self) and not _has_whole_adapters(self):
            arguments = signature.bind(self, save_directory, *args, **kwargs).arguments
            main = bool(arguments.get("is_main_process", True))
            state = _gathered(self, "save_pretrained", is_main_process=main)
            if not state:
                return None  # rank 0 saves
            kwargs["state_dict"] = state
        return original(self, save_directory, *args, **kwargs)

    module.PeftModel.save_pretrained = save_pretrained


def _has_whole_adapters(model: Any) -> bool:
    """Whether all that peft saves is whole on this rank, being small."""
    from peft import get_peft_model_state_dict

    return not _has_shards(get_peft_model_state_dict(model, _state_of(model)))


def _state_of(model: Any) -> dict[str, Any]:
    """Return ``model.state_dict()`` without its hooks, which return shards."""
    tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers())
    return {name: tensor.detach() for name, tensor in tensors}


def _patch_peft_function(module: ModuleType) -> None:
    original: Any = module.get_peft_model_state_dict

    @functools.wraps(original)
    def get_peft_model_state_dict(
        model: Any, state_dict: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        if state_dict is not None or not is_sharded(model):
            return original(model, state_dict, *args, **kwargs)
        small = original(model, _state_of(model), *args, **kwargs)
        if not _has_shards(small):
            return small
        state = _gathered(model, "get_peft_model_state_dict")
        return _from_rank_0(lambda: original(model, state, *args, **kwargs))

    for name, part in list(sys.modules.items()):  # which have imported it before
        if (
            name.partition(".")[0] == "peft"
            and vars(part).get("get_peft_model_state_dict") is original
        ):
            part.get_peft_model_state_dict = get_peft_model_state_dict  # type: ignore[attr-defined]


def _from_rank_0(call: Callable[[], Any]) -> Any:
    """Call on rank 0, and return the result on all ranks. **Collective**."""
    import torch.distributed as dist

    if not dist.is_initialized() or dist.get_world_size() == 1:
        return call()
    box: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            box[0] = call()
        except Exception as error:  # noqa: BLE001 - raised on all ranks
            box[1] = error
    dist.broadcast_object_list(box, src=0)
    if box[1] is not None:
        raise box[1]
    return box[0]


def _has_shards(state_dict: dict[str, Any] | None) -> bool:
    from torch.distributed.tensor import DTensor

    return any(isinstance(value, DTensor) for value in (state_dict or {}).values())


def is_sharded(model: Any) -> bool:
    """Whether an engine of stage 3 has a model, or the model that it is a part of.

    An object with models that is no module itself, such as TRL's mixture of two, is sharded if one
    of them is.
    """
    from torch import nn
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

    from zerotrial.extensions.deepspeed_api.parameter_access import engine_of

    if not isinstance(model, nn.Module):
        return any(is_sharded(part) for part in vars(model).values() if isinstance(part, nn.Module))
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        return True
    parts = any(isinstance(parameter, DTensor) for parameter in model.parameters())
    return parts and engine_of(model) is not None


def _patch_fabric(module: ModuleType) -> None:
    from zerotrial.engine.engine import Engine

    def engines_of(state: dict[str, Any]) -> list[Engine]:
        return [value for value in state.values() if isinstance(value, Engine)]

    module._get_deepspeed_engines_from_state = engines_of  # type: ignore[attr-defined] # noqa: SLF001 - the place that has no public name
