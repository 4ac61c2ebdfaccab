"""Frozen parameters: their original precision, and detection of late unfreezing."""

import logging
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from zerotrial.engine.comm.communicator import Communicator

__all__ = ["FrozenOriginals", "FrozenParameters", "shortened_names"]

logger = logging.getLogger(__name__)

_CHECKED_PER_CALL = 64
"""Number of parameters per check, so that it costs a few microseconds for any model."""


class FrozenOriginals:
    """Values of frozen parameters in their original precision.

    The model computes with rounded values. Each rank keeps its part of the originals in host
    memory, 4 / N bytes per fp32 element on N ranks, for checkpoints and exports.

    Args:
        comm: Communicator of the ranks that share the parts.
        device: Device of the collectives.
        copy: Copies parts to their memory; None: they stay in host memory.
    """

    def __init__(
        self,
        comm: "Communicator",
        device: torch.device,
        copy: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self._comm, self._device, self._copy = comm, device, copy
        self._parts: dict[str, Tensor] = {}

    @property
    def names(self) -> Collection[str]:
        """Names of the parameters with an original."""
        return self._parts.keys()

    @property
    def tensors(self) -> list[Tensor]:
        """This rank's parts."""
        return list(self._parts.values())

    def keep(self, name: str, value: Tensor) -> None:
        """Store this rank's part of a value before it is rounded.

        Args:
            name: Name in ``module.named_parameters()``.
            value: Full value.
        """
        part = self._part_of(value)
        self._parts[name] = part if self._copy is None else self._copy(part)

    def write(self, name: str, value: Tensor) -> None:
        """Replace the original, if there is one, by another full value."""
        if name in self._parts:
            self._parts[name].copy_(self._part_of(value))

    def full(self, name: str, current: Tensor) -> Tensor:
        """Return a full parameter in its original precision. **Collective** if it has an original.

        Args:
            name: Name of the parameter.
            current: Its current full value; elements that differ from the rounded original win.
        """
        part = self._parts.get(name)
        if part is None:
            return current
        buffer = self._comm.allocate(part.numel() * self._comm.size, part.dtype, self._device)
        begin = self._comm.rank * part.numel()
        buffer.tensor[begin : begin + part.numel()].copy_(part)
        self._comm.all_gather(buffer).wait()
        original = buffer.tensor[: current.numel()].view(current.shape).to(current.device)
        same = original.to(current.dtype) == current
        return torch.where(same, original, current.to(original.dtype))

    def _part_of(self, value: Tensor) -> Tensor:
        flat = value.detach().reshape(-1)
        numel = -(-flat.numel() // self._comm.size)
        local = flat[self._comm.rank * numel : (self._comm.rank + 1) * numel]
        part = torch.zeros(numel, dtype=flat.dtype)
        part[: local.numel()].copy_(local)
        return part


class FrozenParameters:
    """Detector of parameters that were unfrozen after the engine was built.

    Args:
        module: The model.
        trained_elsewhere: Returns the parameters that other engines train.
    """

    def __init__(
        self, module: nn.Module, trained_elsewhere: Callable[[], Collection[nn.Parameter]]
    ) -> None:
        self._frozen = [
            (name, parameter)
            for name, parameter in module.named_parameters()
            if not parameter.requires_grad and parameter.is_floating_point()
        ]
        self._trained_elsewhere = trained_elsewhere
        self._next = 0

    def check(self) -> None:
        """Check the next few parameters; warn once about each."""
        if not self._frozen:
            return
        start, self._next = self._next, self._next + _CHECKED_PER_CALL
        if self._next >= len(self._frozen):
            self._next = 0
        if any(
            parameter.requires_grad
            for _, parameter in self._frozen[start : start + _CHECKED_PER_CALL]
        ):
            self._warn()

    def _warn(self) -> None:
        unfrozen = [(name, p) for name, p in self._frozen if p.requires_grad]
        self._frozen = [(name, p) for name, p in self._frozen if not p.requires_grad]
        trained_by_others = self._trained_elsewhere()
        names = [name for name, parameter in unfrozen if parameter not in trained_by_others]
        if names:
            logger.warning(
                "not trained: %s: frozen when the engine was built, and unfrozen since; unfreeze "
                "before initialize(), or give the model to initialize() again",
                shortened_names(names),
            )


def shortened_names(names: Sequence[str]) -> str:
    """Return parameter names for a log line: all, or the first ten and the total."""
    more = f", ... ({len(names)} in all)" if len(names) > 10 else ""
    return ", ".join(names[:10]) + more
