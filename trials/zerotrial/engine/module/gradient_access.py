"""``parameter.grad`` of parameters whose gradients an engine keeps elsewhere.

An engine takes gradients away from its parameters while backward runs. Between the last backward of
an accumulation window and ``step()``, user code may read and write ``parameter.grad`` all the same,
to clip by hand for example. Such a read is answered by the engine: :func:`open_window` has
``nn.Parameter.grad`` ask it where torch itself has no gradient.
"""

import weakref
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

__all__ = [
    "INSTEAD",
    "GradientOwner",
    "close_window",
    "get_raw_gradient",
    "open_window",
    "serve_gradients",
    "set_raw_gradient",
]

_descriptor: Any = torch._C.TensorBase.grad  # noqa: SLF001 - the attribute before it is wrapped
get_raw_gradient: Any = _descriptor.__get__
"""Read the gradient that torch itself has of a tensor; as fast as the attribute."""
set_raw_gradient: Any = _descriptor.__set__


INSTEAD = (
    "set gradient_clipping in the engine file to clip the norm; read a full gradient with "
    "engine.weights.full(name, 'gradient'), and write it with "
    "engine.weights.set_full(name, value, 'gradient')"
)
"""Ends messages about gradients that cannot be read through ``parameter.grad``."""


class GradientOwner(Protocol):
    """An engine, between the last backward of an accumulation window and ``step()``."""

    def owns_gradient(self, parameter: Tensor) -> bool:
        """Return whether the engine keeps the gradient of a parameter."""
        ...

    def read_gradient(self, parameter: Tensor) -> Tensor | None:
        """Return the averaged gradient; writes to it in place count."""
        ...

    def write_gradient(self, parameter: Tensor, value: Tensor | None) -> None:
        """Replace the averaged gradient; None: leave the parameter out of the next step."""
        ...


_owners: "list[weakref.ref[GradientOwner]]" = []
"""Whose windows are open; empty outside of them, and during forward and backward."""


def open_window(owner: GradientOwner) -> None:
    """Have ``parameter.grad`` ask an engine, until :func:`close_window`."""
    _owners.append(weakref.ref(owner))


def close_window(owner: GradientOwner) -> None:
    """End what :func:`open_window` began, if it did."""
    if _owners:
        _owners[:] = [ref for ref in _owners if ref() not in {owner, None}]


def _owner_of(parameter: Tensor) -> GradientOwner | None:
    if torch._C._current_graph_task_id() >= 0:  # noqa: SLF001 - in the backward of another loss
        return None
    for ref in _owners:
        owner = ref()
        if owner is not None and owner.owns_gradient(parameter):
            return owner
    return None


def _get(parameter: Tensor) -> Tensor | None:
    if _owners and (owner := _owner_of(parameter)) is not None:
        return owner.read_gradient(parameter)
    return cast("Tensor | None", get_raw_gradient(parameter))


def _set(parameter: Tensor, value: Tensor | None) -> None:
    if _owners and (owner := _owner_of(parameter)) is not None:
        owner.write_gradient(parameter, value)
    else:
        set_raw_gradient(parameter, value)


def _delete(parameter: Tensor) -> None:
    _set(parameter, None)


def serve_gradients(kind: Any = nn.Parameter) -> None:
    """Have ``grad`` of a class of parameters ask engines from now on.

    Args:
        kind: ``nn.Parameter``, or another class of which parameters are.
    """
    if "grad" not in vars(kind):
        kind.grad = property(_get, _set, _delete, _descriptor.__doc__)
