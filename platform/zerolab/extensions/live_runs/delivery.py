"""Delivery of the rest of a live run whose process has ended."""

import threading

from zerolab.agent.logs import LogShipper
from zerolab.errors import UnreachableError
from zerolab.extensions.live_runs.connection import LiveConnection
from zerolab.extensions.live_runs.run_directory import LiveDirectory
from zerolab.reports.media_files import MEDIA_DIR, MediaUploader
from zerolab.reports.sender import deliver

__all__ = ["finish_delivery", "sync"]

_MEDIA_S = 3600.0


def sync(directory: LiveDirectory, connection: LiveConnection) -> None:
    """Send everything that the server does not have; safe to repeat.

    Raises:
        StaleRunError: If another process reports under the same id, or the run was canceled.
        UnreachableError: If the server is unreachable, or does not take the media.
    """
    connection.open()
    connection.set_hparams(directory.read_info().hparams)
    deliver(directory.path, connection, 0)
    uploader = MediaUploader(directory.path / MEDIA_DIR, connection, threading.Event())
    uploader.start()
    if not uploader.finish(_MEDIA_S):
        raise UnreachableError(f"{directory.path}: not all media could be sent; try again")
    finish_delivery(directory, connection)


def finish_delivery(directory: LiveDirectory, connection: LiveConnection) -> None:
    """Send the rest of the log and the end of the run, then mark the directory as delivered.

    Raises:
        ZerolabError: If the server does not take it.
    """
    LogShipper(directory.folder, 0, connection).ship(final=True)
    connection.end(directory.read_end())
    directory.folder.delivered.touch()
