"""How one rank's error in saving or loading reaches all, as an error of checkpoints."""

from zerolab.errors import StorageError, ZerolabError
from zerotrial.engine.checkpoint.files import CheckpointError
from zerotrial.engine.comm.ranks import GroupRanks

__all__ = ["CheckpointRanks"]


class CheckpointRanks(GroupRanks):
    """The data-parallel ranks, which save and load together.

    Args:
        group: Of the ranks; None for one process.
    """

    def _for_peers(self, kind: type[ZerolabError] | None, text: str) -> Exception:
        error = CheckpointError(text)
        if kind is StorageError:
            error.__cause__ = StorageError(text)
        return error
