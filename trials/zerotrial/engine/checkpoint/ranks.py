"""Ranks that save and load together; errors of one are raised on all as checkpoint errors."""

from zerolab.errors import StorageError, ZerolabError
from zerotrial.engine.checkpoint.files import CheckpointError
from zerotrial.engine.comm.ranks import GroupRanks

__all__ = ["CheckpointRanks"]


class CheckpointRanks(GroupRanks):
    """Data-parallel ranks, which save and load together.

    Args:
        group: Process group; None for one process.
    """

    def _for_peers(self, kind: type[ZerolabError] | None, text: str) -> Exception:
        error = CheckpointError(text)
        if kind is StorageError:
            error.__cause__ = StorageError(text)
        return error
