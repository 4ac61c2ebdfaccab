"""A model that an engine has taken over: who has it, what was changed, and how it is given back.

A notebook's cell is run twice, and builds a second engine on the same model. Two engines that train
one parameter would take each other's gradients, so that the earlier one is closed: its model
becomes plain again, and what is asked of it says so.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from zerolab.errors import ConfigError

__all__ = ["Taken", "is_trained_by_an_engine", "release"]

logger = logging.getLogger(__name__)

_PLACE = "_zerotrial_taken"
"""Where a module keeps those that have it, among its attributes."""

_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_always_called",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_load_state_dict_pre_hooks",
)


class _Holders(list["Taken"]):
    """Those that have a module; a copy of the module, or a file with it, has none."""

    def __deepcopy__(self, memo: Any) -> _Holders:
        return _Holders()

    def __reduce__(self) -> tuple[Any, ...]:
        return (list, ())


class Taken:
    """What one engine has changed about a model.

    Args:
        module: The model, before anything is changed.
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
        """What the engine updates; as the model has them now."""
        self.alone = False
        """Whether no other engine may have any part of the model (stage 3)."""
        self.replaced: dict[nn.Parameter, nn.Parameter] = {}
        """After it was given back: parameters that could not stay, and what stands there now."""

    def hold(
        self, trained: Iterable[nn.Parameter], close: Callable[[], None], *, alone: bool
    ) -> None:
        """Keep the model from now on, and take note of what has been changed.

        Args:
            trained: What the engine updates.
            close: Gives the model back.
            alone: See :attr:`alone`.
        """
        self.trained, self._close, self.alone = frozenset(trained), close, alone
        for part in self._module.modules():
            self._after[part] = _changeable(part)
            vars(part).setdefault(_PLACE, _Holders()).append(self)

    def close(self) -> None:
        """Close the engine, if it is not closed already."""
        self._close()

    @contextmanager
    def undone_if_refused(self) -> Iterator[None]:
        """Give the model back if an engine is not built on it because of the user's mistake."""
        try:
            yield
        except ConfigError:
            self._close()
            self.give_back()
            raise

    def closed_by(self, close: Callable[[], None]) -> None:
        """Take note of what gives parameters back, while the engine is being built."""
        self._close = close

    def trained_elsewhere(self) -> frozenset[nn.Parameter]:
        """Return what other engines train of the model."""
        others = [taken.trained for taken in _holders(self._module) if taken is not self]
        return frozenset[nn.Parameter]().union(*others)

    def replace(self, name: str, old: nn.Parameter, value: torch.Tensor) -> nn.Parameter:
        """Make the plain parameter that takes a sharded one's place, marks and all.

        Args:
            name: In the model.
            old: The sharded one. It has been frozen by the engine if that did not train it.
            value: Whole, and nobody else's memory.
        """
        required, marks = self._marks.get(name, (True, {}))
        frozen_here = required and old not in self.trained
        new = nn.Parameter(value, requires_grad=old.requires_grad or frozen_here)
        vars(new).update(marks)
        self.replaced[old] = new
        return new

    def give_back(self) -> None:
        """Undo what was changed, but for values; what user code has put there since stays."""
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
            holders = vars(part).get(_PLACE, [])
            if self in holders:
                holders.remove(self)
            if not holders:
                vars(part).pop(_PLACE, None)
        self._after, self._before, self._close = {}, {}, _do_nothing


def _changeable(part: nn.Module) -> tuple[Any, dict[str, set[int]]]:
    """What engines change of a module: its own ``forward`` if it has one, and its hooks."""
    return vars(part).get("forward"), {name: set(getattr(part, name)) for name in _HOOKS}


def release(
    module: nn.Module, optimizer: Any, model_parameters: Any, *, alone: bool, tell: bool
) -> Any:
    """Close earlier engines that stand in a new one's way. **Collective**, as they are.

    Args:
        module: That is to be taken over.
        optimizer: The user's, whose parameters are replaced where they could not stay; or None.
        model_parameters: The user's choice of what to train, or None.
        alone: Whether the new engine can share the model with none.
        tell: Whether to log it.

    Returns:
        ``model_parameters``, with parameters of the model as it is now.
    """
    chosen = None if model_parameters is None else list(model_parameters)
    own = isinstance(optimizer, torch.optim.Optimizer)
    wanted = optimizer.param_groups if own else chosen
    trained = set(module.parameters() if wanted is None else _each(wanted))
    replaced: dict[Any, Any] = {}
    for taken in _holders(module):
        if alone or taken.alone or taken.trained & trained:
            taken.close()
            if tell:
                logger.warning(
                    "initialize(): an earlier engine trained this model (%s) and is closed now; go "
                    "on with the one that is returned",
                    type(module).__name__,
                )
            replaced.update(taken.replaced)
    if own:
        optimizer.param_groups[:] = _with(replaced, optimizer.param_groups)
    return None if chosen is None else _with(replaced, chosen)


def _holders(module: nn.Module) -> list[Taken]:
    found: dict[Taken, None] = {}
    for part in module.modules():
        found.update(dict.fromkeys(vars(part).get(_PLACE, ())))
    return list(found)


def is_trained_by_an_engine(part: nn.Module) -> bool:
    """Return whether an engine that is not closed has taken the module over."""
    return bool(vars(part).get(_PLACE))


def _each(given: Iterable[Any]) -> Iterator[Any]:
    """Walk the parameters of a list of them, of named ones or of groups."""
    for item in given:
        if isinstance(item, Mapping):
            members = item.get("params", ())
            yield from _each([members] if isinstance(members, nn.Parameter) else list(members))
        else:
            yield item[1] if isinstance(item, tuple) else item


def _with(replaced: Mapping[Any, Any], given: list[Any]) -> list[Any]:
    """Put new parameters in the place of old ones."""
    if not replaced:
        return given
    found: list[Any] = []
    for item in given:
        if isinstance(item, dict):
            members = item["params"]
            members = [members] if isinstance(members, nn.Parameter) else list(members)
            item["params"] = _with(replaced, members)
            found.append(item)
        elif isinstance(item, tuple):
            found.append((item[0], replaced.get(item[1], item[1])))
        else:
            found.append(replaced.get(item, item))
    return found


def _do_nothing() -> None:
    return
