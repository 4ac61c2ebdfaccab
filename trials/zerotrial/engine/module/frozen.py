"""Frozen parameters: their original precision, and those that are unfrozen too late."""

import logging
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from zerotrial.engine.comm.communicator import Communicator
    from zerotrial.engine.memory.mapped_files import FileMemory

__all__ = ["FrozenOriginals", "FrozenParameters", "some_of"]

logger = logging.getLogger(__name__)

_AT_ONCE = 64
"""Parameters that one look takes, so that it costs a few microseconds whatever the model."""


class FrozenOriginals:
    """Values of frozen parameters in the precision in which the model was given.

    The model computes with rounded values. Each rank keeps its part of the original ones in host
    memory, 4 / N bytes for an element in fp32 on N ranks, for checkpoints and exports.

    Args:
        comm: Between the ranks that share the parts.
        device: Where collectives run.
        files: Where the parts are; None: in memory.
    """

    def __init__(
        self, comm: "Communicator", device: torch.device, files: "FileMemory | None" = None
    ) -> None:
        self._comm, self._device, self._files = comm, device, files
        self._parts: dict[str, Tensor] = {}

    @property
    def names(self) -> Collection[str]:
        """Of the parameters that have an original."""
        return self._parts.keys()

    @property
    def tensors(self) -> list[Tensor]:
        """This rank's parts."""
        return list(self._parts.values())

    def keep(self, name: str, value: Tensor) -> None:
        """Keep this rank's part of a value that is going to be rounded.

        Args:
            name: In ``module.named_parameters()``.
            value: Full.
        """
        part = self._part_of(value)
        self._parts[name] = part if self._files is None else self._files.copy(part)

    def write(self, name: str, value: Tensor) -> None:
        """Replace an original, where there is one, by another full value."""
        if name in self._parts:
            self._parts[name].copy_(self._part_of(value))

    def whole(self, name: str, current: Tensor) -> Tensor:
        """Return a full parameter in its original precision. **Collective** if there is one.

        Args:
            name: Of the parameter.
            current: Its full value now; what differs from the rounded original counts.
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
        own = flat[self._comm.rank * numel : (self._comm.rank + 1) * numel]
        part = torch.zeros(numel, dtype=flat.dtype)
        part[: own.numel()].copy_(own)
        return part


class FrozenParameters:
    """Tells of parameters that require a gradient now, and did not when the engine was built.

    Args:
        module: The model, taken over by the engine.
        trained_elsewhere: Gives the parameters that other engines train.
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
        self._at = 0

    def look(self) -> None:
        """Look at some of them, at the next ones the next time; warn once of each."""
        if not self._frozen:
            return
        start, self._at = self._at, self._at + _AT_ONCE
        if self._at >= len(self._frozen):
            self._at = 0
        if any(parameter.requires_grad for _, parameter in self._frozen[start : start + _AT_ONCE]):
            self._tell()

    def _tell(self) -> None:
        found = [(name, p) for name, p in self._frozen if p.requires_grad]
        self._frozen = [(name, p) for name, p in self._frozen if not p.requires_grad]
        elsewhere = self._trained_elsewhere()
        names = [name for name, parameter in found if parameter not in elsewhere]
        if names:
            logger.warning(
                "not trained: %s: frozen when the engine was built, and unfrozen since; unfreeze "
                "before initialize(), or give the model to initialize() again",
                some_of(names),
            )


def some_of(names: Sequence[str]) -> str:
    """Name parameters in one line of a log: all, or of many the first ten and their number."""
    more = f", ... ({len(names)} in all)" if len(names) > 10 else ""
    return ", ".join(names[:10]) + more
