"""``deepspeed.zero.Init``."""

import contextlib
import functools
import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from zerolab.config.engine.dialect import read_source
from zerolab.errors import ConfigError
from zerotrial.extensions.deepspeed_api.parameter_access import note_that_ranks_differ
from zerotrial.extensions.deepspeed_api.shared_weights import host_memory

__all__ = ["Init"]

logger = logging.getLogger(__name__)

_WHOLE = (
    "until initialize() the ranks of a host hold the model together in its memory, a rank alone in "
    "files of TMPDIR; then the engine file defines where parameters are stored"
)


@functools.cache
def _warn(what: str, reason: str) -> None:
    """Once in a process, for some scripts enter :func:`Init` for each layer."""
    logger.warning("zero.Init(%s): no effect here: %s", what, reason)


@contextlib.contextmanager
def Init(  # noqa: N802, PLR0917 - DeepSpeed's name and arguments, in its order
    module: nn.Module | None = None,
    data_parallel_group: Any = None,
    mem_efficient_linear: bool = True,  # noqa: FBT001, FBT002
    remote_device: str | None = None,
    pin_memory: bool = False,  # noqa: FBT001, FBT002
    config_dict_or_path: Any = None,
    config: Any = None,
    enabled: bool = True,  # noqa: FBT001, FBT002
    dtype: torch.dtype | None = None,
    mpu: Any = None,
    zero_param_parallel_group: Any = None,
    zero_quantized_weights: bool = False,  # noqa: FBT001, FBT002
    zero_quantized_nontrainable_weights: bool = False,  # noqa: FBT001, FBT002
    sequence_data_parallel_group: Any = None,
    param_swapper: Any = None,
    tensor_overrides: Any = None,
) -> Iterator[None]:
    """Give the model being built rank 0's values, stored once per host; ``initialize`` shards it.

    Parameters stay full and plain. The ranks of a host share them until a rank writes to one. A
    submodule is shared as soon as it is assigned to its parent. Afterwards one rank's changes of
    parameters within :class:`GatheredParameters` reach all ranks, because libraries load and
    initialize models this way where DeepSpeed shards them at once. **Collective**.

    Any other setting has no effect and causes a warning.

    Args:
        module: A model that exists already; it is shared, too.
        data_parallel_group: All ranks, or None.
        mem_efficient_linear: Unused; it changes no result.
        remote_device: None, "none" or "cpu".
        pin_memory: False.
        config_dict_or_path: Its ``zero_optimization.offload_param`` sets ``remote_device`` and
            ``pin_memory``; other keys are unused: pass them to ``initialize``.
        config: An older name of it.
        enabled: False: do nothing.
        dtype: Type in which modules are built, or None.
        mpu: None.
        zero_param_parallel_group: None.
        zero_quantized_weights: False.
        zero_quantized_nontrainable_weights: False.
        sequence_data_parallel_group: None.
        param_swapper: None.
        tensor_overrides: Torch functions that DeepSpeed would patch; unused.

    Raises:
        ConfigError: If the config cannot be read.
    """
    del mem_efficient_linear, tensor_overrides
    if not enabled:
        yield
        return
    offload = _offload(config_dict_or_path if config_dict_or_path is not None else config)
    remote_device = offload.get("device", remote_device)
    if remote_device not in {None, "none", "cpu"}:
        _warn(f"remote_device={remote_device!r}", _WHOLE)
    if offload.get("pin_memory", pin_memory):
        _warn("pin_memory=True", _WHOLE)
    if dtype not in {None, torch.get_default_dtype()}:
        reason = (
            "the model is built as without it, and computes in what bf16 and fp16 in the engine "
            "file say; to build it in another type use deepspeed.OnDevice(dtype, 'cpu')"
        )
        _warn(f"dtype={dtype}", reason)
    for name, group in {
        "data_parallel_group": data_parallel_group,
        "sequence_data_parallel_group": sequence_data_parallel_group,
        "zero_param_parallel_group": zero_param_parallel_group,
        "mpu": mpu,
    }.items():
        if group is not None and group is not dist.group.WORLD:
            _warn(name, "all ranks hold the model; give initialize() the mpu")
    for name, value in {
        "zero_quantized_weights": zero_quantized_weights,
        "zero_quantized_nontrainable_weights": zero_quantized_nontrainable_weights,
        "param_swapper": param_swapper,
    }.items():
        if value:
            _warn(name, "ZeRO++ and swapping while a model is built are not supported")
    yield from _held_as_built(module)


def _offload(config: Any) -> Mapping[str, Any]:
    """Block ``offload_param`` of a file."""
    if config is None:
        return {}
    zero = read_source(config)[0].get("zero_optimization", {})
    offload = zero.get("offload_param") if isinstance(zero, Mapping) else None
    if offload is not None and not isinstance(offload, Mapping):
        problem = f"zero_optimization.offload_param: must be a mapping, got {offload!r}"
        raise ConfigError("zero.Init()", [problem])
    return offload or {}


def _held_as_built(module: nn.Module | None) -> Iterator[None]:
    note_that_ranks_differ()
    memory = host_memory()
    if memory is None:
        yield
        return
    new: dict[nn.Parameter, None] = {}
    if module is not None:
        new = dict.fromkeys(module.parameters())

    def note(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
        del module, name
        if not memory.loading:
            new[parameter] = None

    def hold(module: nn.Module, name: str, part: nn.Module | None) -> None:
        del module, name
        ready = [p for p in part.parameters() if p in new] if part is not None else []
        for parameter in ready:
            del new[parameter]
        memory.spread(ready)

    hooks = (
        register_module_parameter_registration_hook(note),
        register_module_module_registration_hook(hold),
    )
    try:
        yield
        memory.spread(new)
    finally:
        for hook in hooks:
            hook.remove()
