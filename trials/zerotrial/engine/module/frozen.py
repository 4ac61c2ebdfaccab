"""Parameters that are unfrozen too late: an engine trains what it found to require a gradient."""

import logging
from collections.abc import Callable, Collection, Sequence

from torch import nn

__all__ = ["FrozenParameters", "some_of"]

logger = logging.getLogger(__name__)

_AT_ONCE = 64
"""Parameters that one look takes, so that it costs a few microseconds whatever the model."""


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
