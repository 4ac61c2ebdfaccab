"""Gathering for calls of submodules outside of the model's forward.

Embeddings, final norms and heads that belong to no block are in the root unit, which is gathered
when the model itself is called. Methods beside ``forward``, such as ``forward_value`` of a reward
model or ``generate`` of an encoder-decoder, call such submodules directly.
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
)

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

__all__ = ["gather_for_standalone_calls"]


def gather_for_standalone_calls(
    units: Sequence[FSDPModule], refresh: Callable[[], None] | None
) -> None:
    """Gather the root unit whenever a submodule that reads its weights is called by itself.

    Such a call is **collective**. With gradients enabled, the unit stays gathered until the end of
    the backward pass, which reduces its gradients. Otherwise it is freed after the call.

    Args:
        units: All units, the root last; sharded and started.
        refresh: **Collective** call before gathering that publishes weights written by user code.
    """
    root = units[-1]
    module, parameters = cast("nn.Module", root), parameters_of(root)
    if parameters is None:
        return
    root_tensors = {member.sharded for member in parameters.members}
    for part in module.modules():
        if part is not module and not root_tensors.isdisjoint(part.parameters()):
            gathering = _StandaloneGather(root, parameters, refresh)
            part.register_forward_pre_hook(gathering.before)
            part.register_forward_hook(gathering.after, always_call=True)


class _StandaloneGather:
    """Gathers the root unit around the forward of one submodule, unless the model's forward runs.

    Args:
        root: The root unit.
        parameters: Parameters of the root unit.
        refresh: Called before gathering.
    """

    def __init__(
        self, root: FSDPModule, parameters: UnitParameters, refresh: Callable[[], None] | None
    ) -> None:
        self._root = root
        self._parameters = parameters
        self._refresh = refresh
        self._opened = False
        self._inside = 0
        """Depth of nested calls within the call that has gathered."""

    def before(self, part: nn.Module, inputs: Any) -> None:
        del part, inputs
        if torch.compiler.is_compiling():
            return
        if not outside_of_passes(self._root):
            self._inside += self._opened
            return
        self._opened, self._inside = False, 0  # the last call may have raised
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
        if (
            output is None and sys.exc_info()[0] is not None
        ):  # forward raised: restore the idle state
            self._root.reset_iter_state()
            return None
        output = leave_forward(self._root, output)
        if not torch.is_grad_enabled():
            self._root.reshard()
        return output
