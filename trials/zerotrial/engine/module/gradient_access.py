"""``parameter.grad`` of parameters whose gradients an engine keeps elsewhere.

An engine removes gradients from its parameters during backward. Between ``backward()`` and
``step()`` user code may still read and write ``parameter.grad``, for example to clip gradients.
:func:`open_window` makes ``nn.Parameter.grad`` use the engine. The attribute of the class is
replaced only while engines that train exist; :func:`serve_gradients` counts them.
"""

import inspect
import os
import sys
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

__all__ = [
    "GRADIENT_ALTERNATIVES",
    "GradientOwner",
    "close_window",
    "get_raw_gradient",
    "open_window",
    "reaches_leaves",
    "serve_gradients",
    "set_raw_gradient",
    "watch_outputs",
]

_descriptor: Any = torch._C.TensorBase.grad  # noqa: SLF001 - the attribute before it is wrapped
get_raw_gradient: Any = _descriptor.__get__
"""Read torch's own gradient of a tensor; as fast as the attribute."""
set_raw_gradient: Any = _descriptor.__set__

GRADIENT_ALTERNATIVES = (
    "set gradient_clipping in the engine file to clip the norm; read a full gradient with "
    "engine.weights.full(name, 'gradient'), and write it with "
    "engine.weights.set_full(name, value, 'gradient')"
)
"""End of error texts about gradients that ``parameter.grad`` cannot provide."""


class GradientOwner(Protocol):
    """Engine or stage that has gradients: after ``backward()`` and before ``step()``."""

    @property
    def gradients_readable(self) -> bool:
        """Whether :meth:`read_gradient` does not raise."""
        ...

    def owns_gradient(self, parameter: Tensor) -> bool:
        """Return whether the engine manages the gradient of a parameter."""
        ...

    def read_gradient(self, parameter: Tensor) -> Tensor | None:
        """Return the averaged gradient of a parameter.

        **Collective** in stages that gather gradients.

        Returns:
            Gradient in the parameter's shape, times the loss scale; writes to it take effect.
            None if there is none.

        Raises:
            EngineError: At stage 3.
        """
        ...

    def write_gradient(self, parameter: Tensor, value: Tensor | None) -> None:
        """Replace the averaged gradient; None excludes the parameter from the step."""
        ...


_owners: "list[weakref.ref[GradientOwner]]" = []
"""Engines with open windows; empty while no engine has gradients, and during backward."""
_APPLY = nn.Module._apply.__code__  # noqa: SLF001 - what to(), cuda() and half() call

_INTERNALS = tuple(
    str(Path(torch.__file__).parent / name) + os.sep
    for name in ("_dynamo", "_functorch", "_inductor", "_subclasses", "distributed/fsdp")
)
"""Code of torch that needs torch's own gradient: compilers inspect the gradients of inputs."""

_ZERO_GRAD = {
    inspect.unwrap(function).__code__
    for function in (nn.Module.zero_grad, torch.optim.Optimizer.zero_grad)
}


def open_window(owner: GradientOwner) -> None:
    """Redirect ``parameter.grad`` to an engine until :func:`close_window`."""
    _owners.append(weakref.ref(owner))


def close_window(owner: GradientOwner) -> None:
    """Undo :func:`open_window`, if it was called."""
    if _owners:
        _owners[:] = [ref for ref in _owners if ref() not in {owner, None}]


def _owner_of(parameter: Tensor) -> GradientOwner | None:
    if torch._C._current_graph_task_id() >= 0:  # noqa: SLF001 - inside another loss's backward
        return None
    for ref in _owners:
        owner = ref()
        if owner is not None and owner.owns_gradient(parameter):
            return owner
    return None


def _get(parameter: Tensor) -> Tensor | None:
    if _owners and (owner := _owner_of(parameter)) is not None:
        caller = sys._getframe(1).f_code  # noqa: SLF001 - no public name
        if caller is _APPLY or caller.co_filename.startswith(_INTERNALS):
            return cast("Tensor | None", get_raw_gradient(parameter))
        if caller in _ZERO_GRAD and not owner.gradients_readable:
            owner.write_gradient(parameter, None)
            return None
        return owner.read_gradient(parameter)
    return cast("Tensor | None", get_raw_gradient(parameter))


def _set(parameter: Tensor, value: Tensor | None) -> None:
    if _owners and (owner := _owner_of(parameter)) is not None:
        owner.write_gradient(parameter, value)
    else:
        set_raw_gradient(parameter, value)


def _delete(parameter: Tensor) -> None:
    _set(parameter, None)


_property = property(_get, _set, _delete, _descriptor.__doc__)
_served: dict[Any, int] = {}
"""Parameter classes with a replaced ``grad``, and the number of engines that need it."""


def serve_gradients(owner: GradientOwner, parameters: Iterable[Tensor]) -> Callable[[], Any]:
    """Replace ``grad`` of the parameters' classes while an engine that needs it exists.

    Args:
        owner: The engine.
        parameters: Parameters of its model.

    Returns:
        Function to call when the engine is closed; freeing the engine calls it, too.
    """
    kinds: set[Any] = {type(parameter) for parameter in parameters}
    kinds = {nn.Parameter, *(kind for kind in kinds if not issubclass(kind, nn.Parameter))}
    for kind in kinds:
        if kind not in _served:
            kind.grad = cast("Any", _property)
        _served[kind] = _served.get(kind, 0) + 1
    end = weakref.finalize(owner, _stop_serving, kinds)
    end.atexit = False
    return end


def _stop_serving(kinds: Iterable[Any]) -> None:
    for kind in kinds:
        _served[kind] -= 1
        if not _served[kind]:
            del _served[kind]
            if vars(kind).get("grad") is _property:
                del kind.grad


def watch_outputs(outputs: Any, callback: Callable[[Tensor], None]) -> None:
    """Register a callback for the gradient of each output.

    Args:
        outputs: Output of a model: a tensor, or nested tuples, lists and dictionaries. Other
            objects are ignored, and so are leaves, which outlive the call: a parameter, an input.
        callback: Callback for autograd.
    """
    if isinstance(outputs, Tensor):
        if outputs.grad_fn is not None:
            outputs.register_hook(callback)  # type: ignore[no-untyped-call]
    elif isinstance(outputs, dict):
        for part in outputs.values():
            watch_outputs(part, callback)
    elif isinstance(outputs, tuple | list):
        for part in outputs:
            watch_outputs(part, callback)


def reaches_leaves(leaves: Iterable[Tensor]) -> bool:
    """Return whether the current backward pass will write the gradient of any leaf.

    ``torch.autograd.grad`` writes none.
    """
    edge = torch.autograd.graph.get_gradient_edge
    try:
        will = torch._C._will_engine_execute_node  # noqa: SLF001 - as torch's multi-gradient hooks
        return any(will(edge(leaf).node) for leaf in leaves)
    except RuntimeError:  # raised for gradients requested by torch.autograd.grad
        return False
