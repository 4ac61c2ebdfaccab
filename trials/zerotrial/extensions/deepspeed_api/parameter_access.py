"""DeepSpeed's functions on single parameters, by the engine that has them."""

import contextlib
import enum
import functools
import itertools
import logging
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from zerotrial.engine.module.units import is_leaf
from zerotrial.engine.stage3.internals import as_gathered
from zerotrial.extensions.deepspeed_api.methods import DeepSpeedMethods
from zerotrial.extensions.deepspeed_api.shared_weights import host_memory

__all__ = [
    "GatheredParameters",
    "OnDevice",
    "ZeroParamStatus",
    "engine_of",
    "know",
    "note_that_ranks_differ",
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_grad",
    "safe_set_full_optimizer_state",
]

logger = logging.getLogger(__name__)

_engines: "weakref.WeakValueDictionary[int, DeepSpeedMethods]" = weakref.WeakValueDictionary()
"""In the order in which they were made, which is the same on all ranks: that of a set is not."""
_numbers = itertools.count()
_parameter_numbers = itertools.count()
_ranks_differ = False
"""Whether a model has been built that one rank alone fills."""


def note_that_ranks_differ() -> None:
    """Make :class:`GatheredParameters` broadcast one rank's changes even without an engine."""
    global _ranks_differ
    _ranks_differ = True


class ZeroParamStatus(enum.Enum):
    """State of a parameter: ``parameter.ds_status``, set by an engine of stage 3."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


def know(engine: DeepSpeedMethods) -> None:
    """Let an engine's parameters be found, and say whether they are whole."""
    _engines[next(_numbers)] = engine
    if engine.config.zero_optimization.stage == 3:
        # Gathered parameters are other objects than the shards, created by each forward.
        Tensor.ds_status = property(_status_of)  # type: ignore[attr-defined]
        Tensor.ds_numel = property(Tensor.numel)  # type: ignore[attr-defined]
        Tensor.ds_shape = property(lambda parameter: parameter.shape)  # type: ignore[attr-defined]
        Tensor.partition_numel = _partition_numel  # type: ignore[attr-defined]
        for parameter in engine.module.parameters():
            parameter.ds_id = next(_parameter_numbers)  # type: ignore[attr-defined]
        for leaf in filter(is_leaf, engine.module.modules()):
            for parameter in leaf.parameters():
                parameter.ds_z3_leaf_module = leaf  # type: ignore[attr-defined]
        module: Any = engine.module
        module.register_state_dict_post_hook(_have_shards_saved)
        engine.optimizer.parameter_offload = HooksOfNone()


def _status_of(parameter: Tensor) -> ZeroParamStatus:
    sharded = isinstance(parameter, DTensor) and not all(
        placement.is_replicate() for placement in parameter.placements
    )
    return ZeroParamStatus.NOT_AVAILABLE if sharded else ZeroParamStatus.AVAILABLE


def _have_shards_saved(
    module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any]
) -> None:
    """Let scripts save ``model.state_dict()`` of stage 3, and warn about its contents.

    Many scripts save it on one rank, next to full weights. torch cannot save shards at an offset.
    """
    del module, prefix, metadata
    if not any(isinstance(value, DTensor) for value in state.values()):
        return
    for name, value in state.items():
        if isinstance(value, DTensor) and not isinstance(value, nn.Parameter):
            state[name] = value.clone()
    _warn_of_shards()


@functools.cache
def _warn_of_shards() -> None:
    if not dist.is_initialized() or dist.get_rank() == 0:
        logger.warning(
            "model.state_dict() at stage 3 has only the shards of its rank; to save all weights, "
            "call engine.save_16bit_model(), or read them within deepspeed.zero.GatheredParameters"
        )


def _partition_numel(parameter: Tensor) -> int:
    """Elements that this rank has of a parameter."""
    return parameter.to_local().numel() if isinstance(parameter, DTensor) else parameter.numel()


class HooksOfNone:
    """``engine.optimizer.parameter_offload``: TRL takes DeepSpeed's hooks off to generate.

    Within :class:`GatheredParameters` there is nothing that ours would gather, so none is found.
    """

    def __init__(self) -> None:
        self.module = _NoModules()
        self.forward_hooks: list[Any] = []
        self.backward_hooks: list[Any] = []

    def _register_deepspeed_module(self, module: nn.Module) -> None:
        """Put the hooks on again."""


class _NoModules(nn.Module):
    def ds_external_parameters(self) -> tuple[()]:
        """Return parameters of other modules that the forward uses."""
        return ()


def _home(parameter: Any) -> tuple[DeepSpeedMethods, str] | None:
    """The engine that has a parameter, and its name there."""
    for engine in _engines.values():
        for name, parameter_ in engine.module.named_parameters():
            if parameter_ is parameter:
                return engine, name
    return None


def engine_of(module: nn.Module) -> tuple[DeepSpeedMethods, str] | None:
    """Find the engine of a module, and the prefix of the module's names there; None without one."""
    for engine in _engines.values():
        for name, part in engine.module.named_modules():
            if part is module:
                return engine, f"{name}." if name else ""
    return None


def _must_have_home(parameter: Any) -> tuple[DeepSpeedMethods, str]:
    home = _home(parameter)
    if home is None:
        msg = "the parameter belongs to no engine; take it from engine.module.named_parameters()"
        raise ValueError(msg)
    return home


def safe_get_full_fp32_param(param: Any) -> Tensor | None:
    """Return the whole master weight. **Collective**."""
    engine, name = _must_have_home(param)
    return engine.full(name)


def safe_get_full_grad(param: Any) -> Tensor | None:
    """Return the whole gradient; None without one. **Collective**."""
    engine, name = _must_have_home(param)
    return engine.full(name, "gradient")


def safe_get_full_optimizer_state(param: Any, optim_state_key: str) -> Tensor | None:
    """Return a full optimizer state, None if it does not exist. **Collective**."""
    engine, name = _must_have_home(param)
    return engine.full(name, optim_state_key)


def safe_set_full_fp32_param(param: Any, value: Tensor) -> None:
    """Write the whole master weight. **Collective**."""
    engine, name = _must_have_home(param)
    engine.set_full(name, value)


def safe_set_full_grad(param: Any, value: Tensor) -> None:
    """Write the whole gradient. **Collective**."""
    engine, name = _must_have_home(param)
    engine.set_full(name, value, "gradient")


def safe_set_full_optimizer_state(param: Any, value: Tensor, optim_state_key: str) -> None:
    """Write a whole optimizer state. **Collective**."""
    engine, name = _must_have_home(param)
    engine.set_full(name, value, optim_state_key)


class GatheredParameters:
    """Gathers parameters within a ``with`` block; see ``deepspeed.zero.GatheredParameters``.

    Inside, a module's attribute (``layer.weight``) is the full parameter in the type of forward.
    References taken before are full, too: plain tensors in the same memory.
    **Collective** if an engine shards them.

    Args:
        params: One or several parameters: of a module, a list or a generator.
        modifier_rank: Rank whose changes reach all ranks at the end; None: changes are lost.
        fwd_module: Unused.
        enabled: False: do nothing.
    """

    def __init__(
        self,
        params: Any,
        modifier_rank: int | None = None,
        fwd_module: Any = None,
        enabled: bool = True,  # noqa: FBT001, FBT002 - DeepSpeed's
    ) -> None:
        del fwd_module
        self._parameters = _listed(params) if enabled else []
        self._modifier = modifier_rank
        self._open = contextlib.ExitStack()

    def __enter__(self) -> None:
        names: dict[DeepSpeedMethods, list[str]] = {}
        ids = {id(parameter) for parameter in self._parameters}
        for engine in list(_engines.values()):
            selected = [n for n, p in engine.module.named_parameters() if id(p) in ids]
            if selected:
                names[engine] = selected
        for engine, selected in names.items():
            parameters = {n: p for n, p in engine.module.named_parameters() if n in selected}
            self._open.enter_context(engine.gathered(selected, modifier_rank=self._modifier))
            for name, reference in parameters.items():
                gathered = engine.module.get_parameter(name)
                if isinstance(reference, DTensor) and not isinstance(gathered, DTensor):
                    self._open.enter_context(as_gathered(reference, gathered))
        if _ranks_differ and not names and self._modifier is not None and dist.is_initialized():
            self._open.callback(_spread, self._parameters, self._modifier)

    def __exit__(self, *error: Any) -> None:
        self._open.__exit__(*error)


def _spread(parameters: list[Any], source: int) -> None:
    """Broadcast values that one rank has loaded or initialized before an engine exists."""
    memory = host_memory()
    if memory is not None:
        memory.spread(parameters, source)


def _listed(params: Any) -> list[Any]:
    if isinstance(params, Tensor):
        return [params]
    if isinstance(params, nn.Module):
        return list(params.parameters())
    if isinstance(params, dict):
        return list(params.values())
    return [item for item in params if isinstance(item, Tensor)] if _many(params) else []


def _many(params: Any) -> bool:
    return isinstance(params, Iterable)


@contextlib.contextmanager
def OnDevice(  # noqa: N802 - DeepSpeed's name
    dtype: Any = None,
    device: Any = "meta",
    enabled: bool = True,  # noqa: FBT001, FBT002 - DeepSpeed's
) -> Iterator[None]:
    """Build a model in a type and on a device."""
    if not enabled:
        yield
        return
    before = torch.get_default_dtype()
    if dtype is not None:
        torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)
