"""Gradient hooks of parameters that another tensor replaces while the model runs."""

# ruff: noqa: SLF001 - torch has no public names for the hooks of a tensor

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

__all__ = ["GradientHooks", "hooks_of", "restore_hooks"]

_KINDS = ("_backward_hooks", "_post_accumulate_grad_hooks")
"""Attributes with the hooks of ``register_hook`` and ``register_post_accumulate_grad_hook``."""

Hooks = dict[int, Any]
"""Hooks by handle; a handle removes its hook."""


def hooks_of(module: nn.Module) -> dict[str, dict[str, Hooks]]:
    """Return the gradient hooks of a model's parameters, by name and kind."""
    by_name = {
        name: {kind: hooks for kind in _KINDS if (hooks := getattr(parameter, kind))}
        for name, parameter in module.named_parameters()
    }
    return {name: hooks for name, hooks in by_name.items() if hooks}


def restore_hooks(module: nn.Module, hooks: Mapping[str, Mapping[str, Hooks]]) -> None:
    """Attach the hooks of a model's previous parameters to the current ones.

    Args:
        module: The model.
        hooks: Result of :func:`hooks_of`.
    """
    for name, kinds in hooks.items():
        parameter = module.get_parameter(name)
        for kind, hooks_of_kind in kinds.items():
            if getattr(parameter, kind) is None:
                setattr(parameter, kind, hooks_of_kind)


class GradientHooks:
    """Hooks of sharded parameters, called with the gradients of the full ones."""

    def __init__(self) -> None:
        self._hooks: dict[Tensor, dict[str, list[Hooks]]] = {}

    def connect(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Connect hooks that were registered on sharded parameters since the last call.

        Without hooks it reads only two attributes per parameter.

        Args:
            pairs: Sharded parameters, and the full ones whose gradients autograd computes.
        """
        for sharded, full in pairs:
            before = sharded._backward_hooks
            after = sharded._post_accumulate_grad_hooks
            if (before or after) and full.requires_grad:
                connected = self._hooks.setdefault(sharded, {kind: [] for kind in _KINDS})
                for kind, current in zip(_KINDS, (before, after), strict=True):
                    if current and not any(current is candidate for candidate in connected[kind]):
                        connected[kind].append(current)
                        _register(full, kind, current)
                if after:  # fully_shard would call them with the sharded gradient
                    setattr(sharded, _KINDS[1], None)

    def give_back(self, sharded: Tensor, plain: Tensor) -> None:
        """Attach a sharded parameter's hooks to its plain replacement."""
        for kind, hook_dicts in self._hooks.get(sharded, {}).items():
            for hooks in hook_dicts if plain.requires_grad else ():
                _register(plain, kind, hooks)


def _register(tensor: Any, kind: str, hooks: Hooks) -> None:
    if kind == "_backward_hooks":
        tensor.register_hook(partial(_run, hooks))
    else:
        tensor.register_post_accumulate_grad_hook(partial(_run_after, hooks))


def _run(hooks: Hooks, gradient: Tensor) -> Tensor:
    for hook in tuple(hooks.values()):
        changed = hook(gradient)
        gradient = gradient if changed is None else changed
    return gradient


def _run_after(hooks: Hooks, parameter: Tensor) -> None:
    for hook in tuple(hooks.values()):
        hook(parameter)
