"""Checkpoints of trials."""

from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar

from zerolab.client.objects.interface import ClientMethods
from zerolab.client.objects.server_object import ServerObject
from zerolab.errors import NotFoundError

__all__ = ["Checkpoint", "download", "load_weights", "require"]


class Checkpoint(ServerObject):
    """Saved state of a trial.

    Example:
        >>> client = zerolab.Client()
        >>> checkpoint = client.experiment(1).best_checkpoint()
        >>> checkpoint.steps_completed, checkpoint.metrics, checkpoint.resources
        (10, {'loss': 0.01}, {'model.txt': 7})
    """

    _shown: ClassVar = ("uuid", "state", "steps_completed")
    _row: ClassVar = ("uuid", "trial_id", "steps_completed", "state", "size_bytes", "metrics")

    uuid: str
    """Unique name."""
    trial_id: int
    """Trial that saved it."""
    experiment_id: int
    """Experiment of the trial."""
    run_id: int | None
    """Run that saved it."""
    steps_completed: int
    """Number of batches that the trial had trained."""
    state: str
    """``COMPLETED``, ``PARTIAL``, ``DELETED`` or ``ERROR``."""
    size_bytes: int
    """Size of all its files."""
    resources: dict[str, int]
    """Size of each file in bytes."""
    metadata: dict[str, Any]
    """Metadata saved with it."""
    metrics: dict[str, float] | None
    """Validation metrics at its step."""
    created_at: datetime | None
    """Time of its completion."""
    path: str
    """Directory, or URL in an object store."""

    def download(self, directory: str | Path | None = None, files: Sequence[str] = ()) -> Path:
        """Download its files through the server; complete files are not downloaded again.

        Args:
            directory: New, empty, or with an earlier copy of it; the uuid by default.
            files: Patterns of the files to download, such as ``*.safetensors``; empty for all.

        Returns:
            The directory.

        Raises:
            ConfigError: If no file matches the patterns.
            ConflictError: If the directory has other content, or the checkpoint was deleted.
            NotFoundError: If a file differs from the saved one.

        Example:
            >>> client = zerolab.Client()
            >>> directory = client.experiment(1).best_checkpoint().download("best")
            >>> (directory / "model.txt").read_text()
            'weights'
        """
        return download(self._client, self.uuid, directory, files)

    def load(self) -> dict[str, Any]:
        """Load its weights, as the state dict of a PyTorch module.

        It reads the engine's checkpoint of a trial, or the only ``.safetensors``, ``.pt``, ``.pth``
        or ``.bin`` file of a script. Files of PyTorch are loaded with ``weights_only=True``: they
        cannot run code. Files are downloaded unless the checkpoint is a directory of this machine.

        Returns:
            Name to tensor, on the CPU.

        Raises:
            NotFoundError: If the checkpoint was deleted or is damaged.
            ConfigError: If it has no such file, several, or one with other objects than tensors.

        Example:
            >>> client = zerolab.Client()
            >>> try:
            ...     client.experiment(1).best_checkpoint().load()
            ... except zerolab.errors.ConfigError as error:
            ...     print(error)
            checkpoint ...: 1 problem(s)
              files: must be ..., got model.txt; use download() and load them yourself
        """
        return load_weights(self._client, self)


def download(
    client: ClientMethods, uuid: str, directory: str | Path | None = None, files: Sequence[str] = ()
) -> Path:
    """Download a checkpoint; return the directory."""
    from zerolab.client.checkpoints import download_checkpoint

    target = Path(uuid if directory is None else directory)
    download_checkpoint(client, uuid, target, files)
    return target


def load_weights(client: ClientMethods, checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Load the weights of a checkpoint, from its directory or from a temporary copy."""
    import tempfile

    from zerolab.registry import PARTS

    read: Callable[[Path], dict[str, Any]] = PARTS["state_dict"].load_state_dict
    path = Path(checkpoint["path"])
    if "://" not in checkpoint["path"] and path.is_dir():
        return read(path)
    with tempfile.TemporaryDirectory(prefix="zerolab-") as folder:
        return read(download(client, checkpoint["uuid"], Path(folder) / checkpoint["uuid"]))


def require(client: ClientMethods, answer: dict[str, Any], owner: str) -> Checkpoint:
    """Return the checkpoint of an answer of ``best-checkpoint``.

    Raises:
        NotFoundError: If it has none.
    """
    if answer["checkpoint"] is None:
        reason = answer["note"] or "no checkpoint has a validation at its step"
        raise NotFoundError(f"{owner} has no best checkpoint: {reason}")
    return Checkpoint(client, answer["checkpoint"])
