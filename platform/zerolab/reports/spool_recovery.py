"""Sends what a dead run has left in its spool."""

from collections.abc import Callable
from pathlib import Path

from zerolab.client.http import Client
from zerolab.reports.reporter import SPOOL_DIR
from zerolab.reports.sender import Shipment
from zerolab.reports.spool import SpoolReader

__all__ = ["deliver"]


def deliver(
    run_dir: Path, client: Client, run_id: int, say: Callable[[str], None] | None = None
) -> int:
    """Ship the rest of a run's reports; call it when its processes are gone.

    Safe to repeat: the server drops what it has stored already.

    Args:
        run_dir: The run's scratch directory.
        client: Where to.
        run_id: Whose reports they are.
        say: Told, when all the rest has arrived, that some were lost, for the trial's log.

    Returns:
        Number of the last record that the server has stored; 0 when the spool is empty.

    Raises:
        StaleRunError: If the server wants nothing of this run any more.
        UnreachableError: If the server cannot take them now; call again later.
    """
    shipment = Shipment(SpoolReader(run_dir / SPOOL_DIR, ended=True), client, run_id)
    while shipment.send_some():
        pass
    if shipment.lost and say is not None:
        say(f"reports of this run that were lost, for their file was damaged: {shipment.lost}")
    return shipment.stored
