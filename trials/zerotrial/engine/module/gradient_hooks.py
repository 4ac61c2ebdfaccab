"""Hooks on gradients, for a parameter whose place another tensor takes while the model runs."""

# ruff: noqa: SLF001 - torch has no public names for the hooks of a tensor

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn

__all__ = ["GradientHooks", "hooks_of", "put_back"]

_KINDS = ("_backward_hooks", "_post_accumulate_grad_hooks")
"""Where a tensor keeps what ``register_hook`` and ``register_post_accumulate_grad_hook`` get."""

Hooks = dict[int, Any]
"""By handle; a handle removes its own."""


def hooks_of(module: nn.Module) -> dict[str, dict[str, Hooks]]:
    """Find the hooks on gradients that a model's parameters have, by name and kind."""
    found = {
        name: {kind: hooks for kind in _KINDS if (hooks := getattr(parameter, kind))}
        for name, parameter in module.named_parameters()
    }
    return {name: hooks for name, hooks in found.items() if hooks}


def put_back(module: nn.Module, hooks: Mapping[str, Mapping[str, Hooks]]) -> None:
    """Give the parameters that a model has now the hooks of those that it had before.

    Args:
        module: The model.
        hooks: From :func:`hooks_of`.
    """
    for name, kinds in hooks.items():
        parameter = module.get_parameter(name)
        for kind, own in kinds.items():
            if getattr(parameter, kind) is None:
                setattr(parameter, kind, own)


class GradientHooks:
    """The hooks of sharded parameters, called with the gradients of the full ones."""

    def __init__(self) -> None:
        self._hooks: dict[Tensor, dict[str, list[Hooks]]] = {}

    def connect(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Have hooks called that were registered on sharded parameters since the last call.

        It costs two attributes of each parameter where there are none.

        Args:
            pairs: Sharded parameters, and the full ones that autograd computes the gradients of.
        """
        for sharded, full in pairs:
            before = sharded._backward_hooks
            after = sharded._post_accumulate_grad_hooks
            if (before or after) and full.requires_grad:
                known = self._hooks.setdefault(sharded, {kind: [] for kind in _KINDS})
                for kind, own in zip(_KINDS, (before, after), strict=True):
                    if own and not any(own is other for other in known[kind]):
                        known[kind].append(own)
                        _register(full, kind, own)
                if after:  # fully_shard would call them with the sharded gradient
                    setattr(sharded, _KINDS[1], None)

    def give_back(self, sharded: Tensor, plain: Tensor) -> None:
        """Give the parameter that takes a sharded one's place its hooks."""
        for kind, each in self._hooks.get(sharded, {}).items():
            for own in each if plain.requires_grad else ():
                _register(plain, kind, own)


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
