"""Selection of the engine's optimizer from the configuration or a user's argument."""

import contextlib
import inspect
from collections.abc import Mapping
from typing import Any

import torch

from zerolab.config.engine.engine_config import EngineConfig
from zerolab.config.engine.optimizers import OPTIMIZERS, OptimizerParams
from zerolab.errors import ConfigError
from zerolab.registry import Registry, subclass_of
from zerotrial.engine.protocols import OptimizerFactory
from zerotrial.engine.update.optimizer_states import is_elementwise

__all__ = [
    "ADAMS",
    "ConfiguredOptimizer",
    "NullOptimizer",
    "UncorrectedAdam",
    "UncorrectedAdamW",
    "UserOptimizer",
    "choose_optimizer",
    "no_optimizer",
]

_ELEMENTWISE = frozenset(
    {
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.SGD,
        torch.optim.Adagrad,
        torch.optim.Adadelta,
        torch.optim.Adamax,
        torch.optim.ASGD,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
    }
)


"""Classes that update each element only from its gradient and states."""


_HUGE_STEP = 2.0**100


"""Step for which ``beta ** step`` is 0 for every beta below 1; adding 1 does not change it."""


class _Uncorrected(torch.optim.Optimizer):
    """Adam without bias correction, with torch's kernels.

    Both corrections are ``1 - beta ** step``, and are 1 if ``step`` is very large. So the kernels
    get a huge step, while the states count the real one. That needs no further pass over the
    parameters and works with every kernel: fused, per tensor, on a GPU or a CPU.
    """

    elementwise = True

    def _init_group(self, group: dict[str, Any], *lists: Any) -> Any:
        """Collect the kernel's arguments; the steps are the last of torch's lists."""
        collect: Any = super()
        collected = collect._init_group(group, *lists)  # noqa: SLF001 - pinned by a test
        if group.get("bias_correction", False):
            return collected
        steps = lists[-1]
        for step in steps:
            step += 1  # noqa: PLW2901 - in place
        steps[:] = [torch.full_like(step, _HUGE_STEP) for step in steps]
        return collected


class UncorrectedAdam(_Uncorrected, torch.optim.Adam):
    """``torch.optim.Adam`` without bias correction."""


class UncorrectedAdamW(_Uncorrected, torch.optim.AdamW):
    """``torch.optim.AdamW`` without bias correction."""


ADAMS: dict[tuple[bool, bool], type[torch.optim.Optimizer]] = {
    (True, True): torch.optim.AdamW,
    (False, True): torch.optim.Adam,
    (True, False): UncorrectedAdamW,
    (False, False): UncorrectedAdam,
}


"""Classes by decoupled weight decay and bias correction."""


CLASSES: Registry[type[torch.optim.Optimizer]] = Registry(
    "zerotrial.optimizers", {}, subclass_of(torch.optim.Optimizer)
)


"""Optimizers of extensions by ``optimizer.type``."""


def _is_elementwise(cls: type) -> bool:
    return cls in _ELEMENTWISE or is_elementwise(cls)


class ConfiguredOptimizer:
    """Optimizer factory of the ``optimizer`` block."""

    def __init__(self, cls: type[torch.optim.Optimizer], params: Mapping[str, Any]) -> None:
        self._cls = cls
        self._params = dict(params)
        self.elementwise = _is_elementwise(cls)

    def __call__(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """Build the optimizer, with torch's fused kernel if there is one."""
        accepted = inspect.signature(self._cls.__init__).parameters
        if "fused" in accepted and not {"fused", "foreach"} & self._params.keys():
            with contextlib.suppress(RuntimeError, TypeError, ValueError):
                return self._build(groups, {**self._params, "fused": True})
        try:
            return self._build(groups, self._params)
        except (RuntimeError, TypeError, ValueError) as problem:
            msg = f"optimizer.params: {self._cls.__name__} refuses them: {problem}"
            raise ConfigError("engine config", [msg]) from problem

    def _build(self, groups: list[dict[str, Any]], params: dict[str, Any]) -> torch.optim.Optimizer:
        return self._cls(_copies(groups), **params)


def _copies(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Copy the groups, because torch writes its defaults into them."""
    return [dict(group) for group in groups]


class UserOptimizer:
    """Optimizer factory of the user's instance, whose parameters it replaces."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self.elementwise = _is_elementwise(type(optimizer))

    def __call__(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """Replace the user's parameters by the engine's tensors."""
        for group, local in zip(self._optimizer.param_groups, groups, strict=True):
            group["params"] = local["params"]
        if isinstance(self._optimizer, torch.optim.Adagrad):
            self._optimizer.state.clear()
            self._optimizer.state.update(_first_states(self._optimizer))
        return self._optimizer


def _first_states(optimizer: torch.optim.Adagrad) -> Mapping[Any, Any]:
    """Return the states that only Adagrad creates before its first step."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if not parameters:
        return {}
    first = optimizer.defaults["initial_accumulator_value"]
    return torch.optim.Adagrad(parameters, initial_accumulator_value=first).state


def _has_stepped(optimizer: torch.optim.Optimizer) -> bool:
    if isinstance(optimizer, torch.optim.Adagrad):
        return any(float(state["step"]) > 0 for state in optimizer.state.values())
    return bool(optimizer.state)


def choose_optimizer(
    config: EngineConfig,
    optimizer: torch.optim.Optimizer | None,
) -> OptimizerFactory:
    """Return the factory: the user's optimizer, the configured one, or a null optimizer.

    Raises:
        ConfigError: If the user's optimizer has already stepped.
    """
    if optimizer is not None:
        if _has_stepped(optimizer):
            msg = "optimizer: must not have stepped before initialize(); pass a fresh one"
            raise ConfigError("initialize()", [msg])
        return UserOptimizer(optimizer)
    if config.optimizer is None:
        return no_optimizer
    return _configured(config.optimizer.type, config.optimizer.params)


def _configured(name: str, params: Mapping[str, Any]) -> ConfiguredOptimizer:
    params = dict(params)
    for key in ("torch_adam", "fp32_optimizer_states", "ns_method"):
        params.pop(key, None)
    cls: type[torch.optim.Optimizer]
    if name in {"Adam", "AdamW"}:
        decoupled = params.pop("adam_w_mode", True) or name == "AdamW"
        corrected = params.pop("bias_correction", True)
        cls = ADAMS[decoupled, corrected]
        # torch's AdamW decays by 0.01 by default, DeepSpeed's does not decay
        params.setdefault("weight_decay", 0.0)
    else:
        cls = CLASSES.get(name) or getattr(torch.optim, name)
    section = OPTIMIZERS.get(name)
    if section is not None and issubclass(section, OptimizerParams):
        params.setdefault("lr", section.model_fields["lr"].default)
    if "betas" in params:
        params["betas"] = tuple(params["betas"])
    return ConfiguredOptimizer(cls, params)


class NullOptimizer(torch.optim.Optimizer):
    """Optimizer without parameters, which torch's class does not permit."""

    elementwise = True

    def __init__(self) -> None:
        self.defaults: dict[str, Any] = {}
        self.param_groups: list[dict[str, Any]] = []
        self.state: Any = {}

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Do nothing."""

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002 - torch's
        """Do nothing."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state dict of an optimizer without parameters."""
        return {"state": {}, "param_groups": []}


class _NullOptimizerFactory:
    """Optimizer factory that returns a null optimizer."""

    elementwise = True

    def __call__(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """Return a null optimizer; there are no groups."""
        del groups
        return NullOptimizer()


no_optimizer = _NullOptimizerFactory()


"""Optimizer factory of inference-only engines."""
