"""From a configuration or a user's argument to the one optimizer of an engine."""

import contextlib
import inspect
from collections.abc import Mapping
from typing import Any

import torch

from zerolab.config.engine.engine_config import EngineConfig
from zerolab.config.engine.optimizers import OPTIMIZERS
from zerolab.errors import ConfigError
from zerolab.registry import Registry
from zerotrial.engine.protocols import OptimizerFactory
from zerotrial.engine.update.null_optimizer import no_optimizer
from zerotrial.engine.update.optimizer_states import is_elementwise
from zerotrial.engine.update.uncorrected_adam import UncorrectedAdam, UncorrectedAdamW

__all__ = ["ADAMS", "ConfiguredOptimizer", "GivenOptimizer", "choose_optimizer"]

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
"""Classes that update each element from its own gradient and states alone."""


ADAMS: dict[tuple[bool, bool], type[torch.optim.Optimizer]] = {
    (True, True): torch.optim.AdamW,
    (False, True): torch.optim.Adam,
    (True, False): UncorrectedAdamW,
    (False, False): UncorrectedAdam,
}
"""By whether the weight decay is decoupled, and whether the moments are corrected."""


def _class(loaded: Any) -> type[torch.optim.Optimizer]:
    if not (isinstance(loaded, type) and issubclass(loaded, torch.optim.Optimizer)):
        raise TypeError(f"must be a subclass of torch.optim.Optimizer, got {loaded!r}")
    return loaded


CLASSES: Registry[type[torch.optim.Optimizer]] = Registry("zerotrial.optimizers", {}, _class)
"""Optimizers of extensions by ``optimizer.type``."""


def _is_elementwise(cls: type) -> bool:
    return cls in _ELEMENTWISE or is_elementwise(cls)


class ConfiguredOptimizer:
    """The ``optimizer`` block; see :class:`~zerotrial.engine.protocols.OptimizerFactory`."""

    def __init__(self, cls: type[torch.optim.Optimizer], params: Mapping[str, Any]) -> None:
        self._cls = cls
        self._params = dict(params)
        self.elementwise = _is_elementwise(cls)

    def __call__(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """Build it, fused where torch has a fused kernel for it."""
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
    """Copy the groups, since torch writes its defaults into them."""
    return [dict(group) for group in groups]


class GivenOptimizer:
    """The user's instance, whose parameters the stage's tensors replace."""

    def __init__(self, given: torch.optim.Optimizer) -> None:
        self._given = given
        self.elementwise = _is_elementwise(type(given))

    def __call__(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """Put the engine's tensors in the place of the user's parameters."""
        for group, mine in zip(self._given.param_groups, groups, strict=True):
            group["params"] = mine["params"]
        if isinstance(self._given, torch.optim.Adagrad):
            self._given.state.clear()
            self._given.state.update(_first_states(self._given))
        return self._given


def _first_states(optimizer: torch.optim.Adagrad) -> Mapping[Any, Any]:
    """Make the states that Adagrad, unlike the others, has before its first step."""
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
    given: torch.optim.Optimizer | None,
) -> OptimizerFactory:
    """Take the user's optimizer, else the configuration's, else none: for evaluation.

    Raises:
        ConfigError: If the user's has stepped before.
    """
    if given is not None:
        if _has_stepped(given):
            msg = "optimizer: must not have stepped before initialize(); pass a fresh one"
            raise ConfigError("initialize()", [msg])
        return GivenOptimizer(given)
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
        # torch's AdamW decays by 0.01 where DeepSpeed's does not decay
        params.setdefault("weight_decay", 0.0)
    elif name == "Lion":
        from zerotrial.engine.update.lion import Lion

        cls = Lion
    elif name == "LAMB":
        from zerotrial.engine.update.lamb import Lamb

        cls = Lamb
    elif name == "Muon":
        from zerotrial.engine.update.muon import MuonWithAdamW

        cls = MuonWithAdamW
    else:
        cls = CLASSES.get(name) or getattr(torch.optim, name)
    if name in OPTIMIZERS and name not in CLASSES:
        params.setdefault("lr", 1e-3)
    if "betas" in params:
        params["betas"] = tuple(params["betas"])
    return ConfiguredOptimizer(cls, params)
