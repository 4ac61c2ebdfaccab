"""``from_pretrained`` at stage 3: the ranks of a host share the model's memory.

Under ``deepspeed.zero.Init`` transformers uses a separate loading path, which does not report
unexpected keys, and reports mismatched ones on one rank only. Here every rank loads as without
DeepSpeed, and each parameter moves to shared memory as soon as it is loaded.
"""

import contextlib
import functools
import os
from collections.abc import Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any

from zerolab.errors import ConfigError
from zerotrial.extensions import after_import

if TYPE_CHECKING:
    from torch import nn

    from zerotrial.extensions.deepspeed_api.shared_weights import HostMemory

__all__ = ["patch_when_imported"]

_DEVICE_MAP = (
    "device_map: must be left out at stage 3, where the engine places parameters, got {}; "
    "load the model where no HfDeepSpeedConfig or TrainingArguments(deepspeed=...) of stage 3 is "
    "alive, if it is not for training"
)
_LOADED = "_is_hf_initialized"
"""transformers' mark of parameters that it has loaded; what it makes otherwise has it not yet."""
_ONE_BY_ONE = "HF_DEACTIVATE_ASYNC_LOAD"
"""transformers' variable: it reads a parameter when it is needed, none ahead."""


def patch_when_imported() -> None:
    """Patch the module now if it is imported already, else on import."""
    after_import.patch_when_imported(
        {"transformers.modeling_utils": _patch, "transformers.generation.utils": _patch_generate}
    )


_BEFORE_SYNCED = 5
"""Arguments of ``generate`` that come before ``synced_gpus``."""


def _patch_generate(module: ModuleType) -> None:
    """Have a model that is whole answer on one rank alone: only a sharded one needs the others."""
    original = module.GenerationMixin.generate

    @functools.wraps(original)
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        from zerotrial.extensions.deepspeed_api.save_hooks import is_sharded

        if len(args) <= _BEFORE_SYNCED and not is_sharded(self):
            kwargs.setdefault("synced_gpus", False)
        return original(self, *args, **kwargs)

    module.GenerationMixin.generate = generate


def _patch(module: ModuleType) -> None:
    original = module.PreTrainedModel.from_pretrained.__func__

    @functools.wraps(original)
    def from_pretrained(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("quantization_config") is not None or not module.is_deepspeed_zero3_enabled():
            return original(cls, *args, **kwargs)
        if kwargs.get("device_map") is not None:
            raise ConfigError("from_pretrained()", [_DEVICE_MAP.format(kwargs["device_map"])])
        from zerotrial.engine.memory.heap import trim_heap
        from zerotrial.extensions.deepspeed_api.parameter_access import note_that_ranks_differ
        from zerotrial.extensions.deepspeed_api.shared_weights import host_memory

        memory = host_memory()
        with _as_without_deepspeed(), _held_as_loaded(memory):
            result = original(cls, *args, **kwargs)
        if memory is not None:
            note_that_ranks_differ()
            model = result[0] if isinstance(result, tuple) else result
            memory.spread(_own(model))
            trim_heap()
        return result

    module.PreTrainedModel.from_pretrained = classmethod(from_pretrained)


def _own(model: "nn.Module") -> "list[nn.Parameter]":
    """Broadcast values missing in the files, which each rank has initialized randomly."""
    from zerotrial.engine.memory.copy_on_write import is_copy_on_write

    return [parameter for parameter in model.parameters() if not is_copy_on_write(parameter)]


@contextlib.contextmanager
def _as_without_deepspeed() -> Iterator[None]:
    from transformers.integrations import deepspeed

    alive = deepspeed._hf_deepspeed_config_weak_ref  # noqa: SLF001 - is_deepspeed_zero3_enabled() reads it
    deepspeed.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        deepspeed._hf_deepspeed_config_weak_ref = alive  # noqa: SLF001 - as above


@contextlib.contextmanager
def _held_as_loaded(memory: "HostMemory | None") -> Iterator[None]:
    if memory is None:
        yield
        return
    from torch.nn.modules.module import register_module_parameter_registration_hook

    def hold(module: "nn.Module", name: str, parameter: "nn.Parameter") -> None:
        del module, name
        if getattr(parameter, _LOADED, False):
            memory.hold([parameter])

    before = os.environ.get(_ONE_BY_ONE)
    os.environ[_ONE_BY_ONE] = "1"
    hook = register_module_parameter_registration_hook(hold)
    memory.loading = True
    try:
        yield
    finally:
        memory.loading = False
        hook.remove()
        if before is None:
            del os.environ[_ONE_BY_ONE]
        else:
            os.environ[_ONE_BY_ONE] = before
