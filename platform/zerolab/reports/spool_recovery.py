"""Upload of the spool that a dead run has left behind."""

from collections.abc import Callable
from pathlib import Path

from zerolab.client.http import Client
from zerolab.reports.reporter import SPOOL_DIR
from zerolab.reports.sender import SpoolUploader
from zerolab.reports.spool import SpoolReader

__all__ = ["deliver"]


def deliver(
    run_dir: Path, client: Client, run_id: int, log: Callable[[str], None] | None = None
) -> int:
    """Upload the remaining reports of a run whose processes have ended.

    Safe to repeat: the server drops records that it has stored already.

    Args:
        run_dir: The run's scratch directory.
        client: Client of the server.
        run_id: The run.
        log: Called with a message for the trial's log if reports were lost, once the rest has
            arrived.

    Returns:
        Number of the last record that the server has stored; 0 when the spool is empty.

    Raises:
        StaleRunError: If the server rejects the run: it has ended or was superseded.
        UnreachableError: If the server is unreachable; call again later.
    """
    uploader = SpoolUploader(SpoolReader(run_dir / SPOOL_DIR, ended=True), client, run_id)
    while uploader.send_batch():
        pass
    if uploader.lost and log is not None:
        log(f"reports of this run that were lost because their file was damaged: {uploader.lost}")
    return uploader.stored
