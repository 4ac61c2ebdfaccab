"""Ownership of a model by engines, and restoration of the model.

A notebook cell that runs twice builds a second engine on the same model. Two engines that train one
parameter would take each other's gradients. So the earlier one is closed: its model becomes plain
again, and further calls of it raise.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from zerolab.errors import ConfigError

__all__ = ["ModelOwnership", "close_conflicting_engines", "is_trained_by_an_engine"]

logger = logging.getLogger(__name__)

_OWNERS = "_zerotrial_taken"
"""Attribute of a module with its owners."""

_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_always_called",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_load_state_dict_pre_hooks",
)


class _Owners(list["ModelOwnership"]):
    """Owners of a module; a copy of the module, or a pickle, has none."""

    def __deepcopy__(self, memo: Any) -> _Owners:
        return _Owners()

    def __reduce__(self) -> tuple[Any, ...]:
        return (list, ())


class ModelOwnership:
    """Changes of one engine to a model.

    Args:
        module: The model, before any change.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._before = {part: _changeable(part) for part in module.modules()}
        self._after: dict[nn.Module, tuple[Any, dict[str, set[int]]]] = {}
        self._marks = {
            name: (parameter.requires_grad, dict(vars(parameter)))
            for name, parameter in module.named_parameters()
        }
        self._close: Callable[[], None] = _do_nothing
        self.trained: frozenset[nn.Parameter] = frozenset()
        """Parameters that the engine updates, as they are in the model now."""
        self.exclusive = False
        """Whether no other engine may use any part of the model (stage 3)."""
        self.replaced: dict[nn.Parameter, nn.Parameter] = {}
        """After restoration: replaced parameters, and their replacements."""

    def acquire(
        self, trained: Iterable[nn.Parameter], close: Callable[[], None], *, exclusive: bool
    ) -> None:
        """Own the model from now on, and record the changes.

        Args:
            trained: Parameters that the engine updates.
            close: Restores the model.
            exclusive: See :attr:`exclusive`.
        """
        self.trained, self._close, self.exclusive = frozenset(trained), close, exclusive
        for part in self._module.modules():
            self._after[part] = _changeable(part)
            vars(part).setdefault(_OWNERS, _Owners()).append(self)

    def close(self) -> None:
        """Close the engine, if it is not closed already."""
        self._close()

    @contextmanager
    def restored_on_error(self) -> Iterator[None]:
        """Restore the model if building the engine fails with a user error."""
        try:
            yield
        except ConfigError:
            self._close()
            self.give_back()
            raise

    def set_close(self, close: Callable[[], None]) -> None:
        """Set the function that restores parameters, while the engine is being built."""
        self._close = close

    def trained_elsewhere(self) -> frozenset[nn.Parameter]:
        """Return the parameters of the model that other engines train."""
        trained_by_others = [
            ownership.trained for ownership in _owners_of(self._module) if ownership is not self
        ]
        return frozenset[nn.Parameter]().union(*trained_by_others)

    def replace(self, name: str, old: nn.Parameter, value: torch.Tensor) -> nn.Parameter:
        """Return the plain parameter that replaces a sharded one, with its attributes.

        Args:
            name: Name in the model.
            old: Sharded parameter; the engine has frozen it if it did not train it.
            value: Full value in separate memory.
        """
        required, marks = self._marks.get(name, (True, {}))
        frozen_here = required and old not in self.trained
        new = nn.Parameter(value, requires_grad=old.requires_grad or frozen_here)
        vars(new).update(marks)
        self.replaced[old] = new
        return new

    def give_back(self) -> None:
        """Undo all changes except for values; later changes of user code stay."""
        after = self._after or {part: _changeable(part) for part in self._module.modules()}
        for part, (forward, hooks) in after.items():
            old_forward, old_hooks = self._before.get(part, (None, {}))
            if vars(part).get("forward") is forward is not old_forward:
                vars(part).pop("forward")
                if old_forward is not None:
                    part.forward = old_forward
            for name, keys in hooks.items():
                for key in keys - old_hooks.get(name, set()):
                    getattr(part, name).pop(key, None)
            holders = vars(part).get(_OWNERS, [])
            if self in holders:
                holders.remove(self)
            if not holders:
                vars(part).pop(_OWNERS, None)
        self._after, self._before, self._close = {}, {}, _do_nothing


def _changeable(part: nn.Module) -> tuple[Any, dict[str, set[int]]]:
    """Return what engines change in a module: an instance ``forward``, and its hooks."""
    return vars(part).get("forward"), {name: set(getattr(part, name)) for name in _HOOKS}


def close_conflicting_engines(
    module: nn.Module, optimizer: Any, model_parameters: Any, *, exclusive: bool, log: bool
) -> Any:
    """Close earlier engines that conflict with a new one. **Collective** if they are.

    Args:
        module: Model of the new engine.
        optimizer: The user's optimizer, whose replaced parameters are updated; or None.
        model_parameters: The user's parameters to train, or None.
        exclusive: Whether the new engine needs exclusive ownership.
        log: Whether to log a warning.

    Returns:
        ``model_parameters``, with the model's current parameters.
    """
    chosen = None if model_parameters is None else list(model_parameters)
    is_optimizer = isinstance(optimizer, torch.optim.Optimizer)
    sources = optimizer.param_groups if is_optimizer else chosen
    trained = set(module.parameters() if sources is None else _parameters_in(sources))
    replaced: dict[Any, Any] = {}
    for ownership in _owners_of(module):
        if exclusive or ownership.exclusive or ownership.trained & trained:
            ownership.close()
            if log:
                logger.warning(
                    "initialize(): an earlier engine trained this model (%s) and is closed; "
                    "use the engine that initialize() returns",
                    type(module).__name__,
                )
            replaced.update(ownership.replaced)
    if is_optimizer:
        optimizer.param_groups[:] = _replaced_in(replaced, optimizer.param_groups)
    return None if chosen is None else _replaced_in(replaced, chosen)


def _owners_of(module: nn.Module) -> list[ModelOwnership]:
    owners: dict[ModelOwnership, None] = {}
    for part in module.modules():
        owners.update(dict.fromkeys(vars(part).get(_OWNERS, ())))
    return list(owners)


def is_trained_by_an_engine(part: nn.Module) -> bool:
    """Return whether an open engine owns the module."""
    return bool(vars(part).get(_OWNERS))


def _parameters_in(items: Iterable[Any]) -> Iterator[Any]:
    """Iterate over parameters in a list of parameters, named parameters or groups."""
    for item in items:
        if isinstance(item, Mapping):
            members = item.get("params", ())
            yield from _parameters_in(
                [members] if isinstance(members, nn.Parameter) else list(members)
            )
        else:
            yield item[1] if isinstance(item, tuple) else item


def _replaced_in(replaced: Mapping[Any, Any], items: list[Any]) -> list[Any]:
    """Replace old parameters by new ones."""
    if not replaced:
        return items
    result: list[Any] = []
    for item in items:
        if isinstance(item, dict):
            members = item["params"]
            members = [members] if isinstance(members, nn.Parameter) else list(members)
            item["params"] = _replaced_in(replaced, members)
            result.append(item)
        elif isinstance(item, tuple):
            result.append((item[0], replaced.get(item[1], item[1])))
        else:
            result.append(replaced.get(item, item))
    return result


def _do_nothing() -> None:
    return
