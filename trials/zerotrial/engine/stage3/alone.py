"""Lets parts of a model be called on their own, outside of its forward.

What belongs to no block (embeddings, last norms, heads) is of the root unit, and that is gathered
when the whole model is called. A method beside ``forward``, such as a reward model's
``forward_value``, calls an encoder and a head; ``generate`` of an encoder and decoder calls the
encoder alone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from zerotrial.engine.stage3.internals import (
    UnitParameters,
    enter_forward,
    leave_forward,
    outside_of_passes,
    parameters_of,
    reset_iteration,
)

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

__all__ = ["gather_when_alone"]


def gather_when_alone(units: Sequence[FSDPModule], refresh: Callable[[], None] | None) -> None:
    """Have every part of a model that reads weights of the root unit gather it, if nobody has.

    **Collective** is then what calls such a part: each rank must do it as often. With gradients the
    unit stays gathered until the backward pass has ended, which reduces it; else it is freed.

    Args:
        units: All of them, the root last; sharded and started.
        refresh: Called before, **collective**: publishes what user code has written to weights.
    """
    root = units[-1]
    module, parameters = cast("nn.Module", root), parameters_of(root)
    if parameters is None:
        return
    own = {member.sharded for member in parameters.members}
    for part in module.modules():
        if part is not module and not own.isdisjoint(part.parameters()):
            gathering = _Gathering(root, parameters, refresh)
            part.register_forward_pre_hook(gathering.before)
            part.register_forward_hook(gathering.after, always_call=True)


class _Gathering:
    """Gathers the root unit around the forward of one part, unless it runs within the model's.

    Args:
        root: The unit.
        parameters: Of the unit.
        refresh: Called first.
    """

    def __init__(
        self, root: FSDPModule, parameters: UnitParameters, refresh: Callable[[], None] | None
    ) -> None:
        self._root = root
        self._parameters = parameters
        self._refresh = refresh
        self._opened = False
        self._inside = 0
        """Calls of the part by itself, within the one that has gathered."""

    def before(self, part: nn.Module, inputs: Any) -> None:
        del part, inputs
        if torch.compiler.is_compiling():
            return
        if not outside_of_passes(self._root):
            self._inside += self._opened
            return
        self._opened, self._inside = False, 0  # whatever has become of the last call
        gathered = self._parameters.gathered
        if gathered and not torch.is_grad_enabled():
            return
        if self._refresh is not None and not gathered:
            self._refresh()
        enter_forward(self._root)
        self._opened = True

    def after(self, part: nn.Module, inputs: Any, output: Any) -> Any:
        del part, inputs
        if not self._opened:
            return None
        if self._inside:
            self._inside -= 1
            return None
        self._opened = False
        if output is None and sys.exc_info()[0] is not None:  # the next call finds nothing begun
            reset_iteration(self._root)
            return None
        output = leave_forward(self._root, output)
        if not torch.is_grad_enabled():
            self._root.reshard()
        return output
