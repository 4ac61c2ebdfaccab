"""Models of the registry."""

from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar, Self

from zerolab.client.objects.checkpoint import Checkpoint, download, load_weights
from zerolab.client.objects.server_object import ServerObject
from zerolab.errors import NotFoundError

__all__ = ["Model", "ModelVersion"]


class ModelVersion(ServerObject):
    """Registered checkpoint of a model.

    Example:
        >>> client = zerolab.Client()
        >>> checkpoint = client.experiment(1).best_checkpoint()
        >>> model = client.create_model("versioned").register(checkpoint, "first")
        >>> version = model.versions[0]
        >>> version.version, version.notes, version.metrics
        (1, 'first', {'loss': 0.01})
    """

    _shown: ClassVar = ("version", "checkpoint")
    _row: ClassVar = (
        "version", "aliases", "checkpoint", "experiment_id", "metrics", "notes", "created_at",
    )  # fmt: skip

    version: int
    """Number, from 1; never reused."""
    checkpoint: str
    """Uuid of the checkpoint."""
    experiment_id: int
    """Experiment of the checkpoint."""
    trial_id: int
    """Trial of the checkpoint."""
    steps_completed: int
    """Number of batches that the trial had trained."""
    size_bytes: int
    """Size of all its files."""
    metrics: dict[str, float] | None
    """Validation metrics at its step."""
    notes: str
    """Notes from its registration."""
    aliases: list[str]
    """Aliases of this version, sorted."""
    created_at: datetime | None
    """Time of registration."""

    def download(self, directory: str | Path | None = None) -> Path:
        """Download the files of its checkpoint.

        Args:
            directory: As in :meth:`Checkpoint.download`.

        Returns:
            The directory.

        Raises:
            ConflictError: If the directory has other content.

        Example:
            >>> client = zerolab.Client()
            >>> checkpoint = client.experiment(1).best_checkpoint()
            >>> model = client.create_model("downloaded").register(checkpoint)
            >>> sorted(path.name for path in model.newest.download("version-1").iterdir())
            ['checkpoint.json', 'model.txt']
        """
        return download(self._client, self.checkpoint, directory)

    def load(self) -> dict[str, Any]:
        """Load its weights, as :meth:`Checkpoint.load`.

        Returns:
            Name to tensor, on the CPU.

        Raises:
            ConfigError: If the checkpoint has no weights.

        Example:
            >>> client = zerolab.Client()
            >>> checkpoint = client.experiment(1).best_checkpoint()
            >>> model = client.create_model("loaded").register(checkpoint)
            >>> try:
            ...     model.newest.load()
            ... except zerolab.errors.ConfigError:
            ...     print("the script saved a text")
            the script saved a text
        """
        return load_weights(self._client, self._client.checkpoint(self.checkpoint))


class Model(ServerObject):
    """Model of the registry: checkpoints with a name and versions.

    Example:
        >>> client = zerolab.Client()
        >>> client.create_model("translator", "Translates texts")
        Model('translator', description='Translates texts')
        >>> client.model("translator").versions
        []
    """

    _shown: ClassVar = ("name", "description")

    name: str
    """Name of the model."""
    description: str
    """Description."""
    owner: str | None
    """User who created it; None while the installation has a single user."""
    project: str | None
    """Its project; None if the installation has only one project."""
    created_at: datetime | None
    """Time of creation."""

    @property
    def versions(self) -> list[ModelVersion]:
        """Versions of the model, the oldest first."""
        return [ModelVersion(self._client, fields) for fields in self["versions"]]

    @property
    def newest(self) -> ModelVersion:
        """Newest version of the model."""
        return self.version()

    def version(self, number: int | str | None = None) -> ModelVersion:
        """Return a version of the model.

        Args:
            number: Number or alias of the version; None for the newest.

        Returns:
            The version.

        Raises:
            NotFoundError: If the model does not have it.

        Example:
            >>> client = zerolab.Client()
            >>> model = client.create_model("empty-model")
            >>> try:
            ...     model.version(2)
            ... except zerolab.errors.NotFoundError as error:
            ...     print(error)
            model empty-model has no version 2; it has: none
        """
        versions = self.versions
        for version in reversed(versions):
            if number is None or version.version == number or number in version["aliases"]:
                return version
        known = ", ".join(str(version.version) for version in versions) or "none"
        requested = "version" if number is None else f"version {number}"
        raise NotFoundError(f"model {self.name} has no {requested}; it has: {known}")

    def register(self, checkpoint: Checkpoint | str, notes: str = "") -> Self:
        """Make a checkpoint the next version of the model.

        Retention then keeps the checkpoint.

        Args:
            checkpoint: The checkpoint, or its uuid.
            notes: Notes for readers.

        Returns:
            The model, updated.

        Raises:
            ConfigError: If the checkpoint does not exist, or files of it were removed.

        Example:
            >>> client = zerolab.Client()
            >>> checkpoint = client.experiment(1).best_checkpoint()
            >>> client.create_model("best-model").register(checkpoint).newest.version
            1
        """
        uuid = checkpoint if isinstance(checkpoint, str) else checkpoint.uuid
        return self._update(self._client.register_version(self.name, uuid, notes))

    def set_alias(self, alias: str, version: int) -> Self:
        """Assign an alias to a version; it leaves its previous version.

        Args:
            alias: The alias, such as ``production``: letters, digits, ``.``, ``_`` or ``-``, and
                no number.
            version: Number of the version.

        Returns:
            The model, updated.

        Raises:
            NotFoundError: If the model does not have the version.
            ConfigError: If the alias is invalid.

        Example:
            >>> client = zerolab.Client()
            >>> checkpoint = client.experiment(1).best_checkpoint()
            >>> model = client.create_model("aliased").register(checkpoint)
            >>> model.set_alias("production", 1).version("production").aliases
            ['production']
        """
        return self._update(self._client.put_alias(self.name, alias, version))

    def remove_alias(self, alias: str) -> Self:
        """Remove an alias; its version stays.

        Args:
            alias: The alias.

        Returns:
            The model, updated.

        Raises:
            NotFoundError: If the model does not have it.

        Example:
            >>> client = zerolab.Client()
            >>> checkpoint = client.experiment(1).best_checkpoint()
            >>> model = client.create_model("unaliased").register(checkpoint)
            >>> model.set_alias("candidate", 1).remove_alias("candidate").newest.aliases
            []
        """
        self._client.remove_alias(self.name, alias)
        return self._update(self._client.model(self.name))

    def load(self) -> dict[str, Any]:
        """Load the weights of the newest version, as :meth:`Checkpoint.load`.

        Returns:
            Name to tensor, on the CPU.

        Raises:
            NotFoundError: If the model has no version.

        Example:
            >>> client = zerolab.Client()
            >>> model = client.create_model("no-version")
            >>> try:
            ...     model.load()
            ... except zerolab.errors.NotFoundError as error:
            ...     print(error)
            model no-version has no version; it has: none
        """
        return self.version().load()
