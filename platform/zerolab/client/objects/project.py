"""Projects, to which experiments and models belong."""

from datetime import datetime
from typing import Any, ClassVar, Self

from zerolab.client.objects.experiment import Experiment
from zerolab.client.objects.server_object import ServerObject
from zerolab.client.objects.table import ObjectList

__all__ = ["Project"]


class Project(ServerObject):
    """Project, to which experiments and models belong.

    Example:
        >>> client = zerolab.Client()
        >>> project = client.create_project("vision", "Image models")
        >>> project.edit(notes="ask ann").notes
        'ask ann'
        >>> project.list_experiments()
        []
    """

    _shown: ClassVar = ("name", "experiments")
    _row: ClassVar = ("name", "description", "experiments", "models", "archived", "created_at")

    name: str
    """Name of the project."""
    description: str
    """Description; can be changed."""
    notes: str
    """Notes; can be changed."""
    owner: str | None
    """User who created it; None while the installation has a single user."""
    archived: bool
    """Whether it accepts no new experiments and models."""
    restricted: bool
    """Whether only its owner, its members and administrators see it."""
    experiments: int
    """Number of its experiments."""
    unfinished: int
    """Number of its experiments that have not ended."""
    models: int
    """Number of its models."""
    last_experiment_at: datetime | None
    """Time of its last submission."""
    created_at: datetime
    """Time of creation."""

    def list_experiments(self, **filters: Any) -> ObjectList[Experiment]:
        """List its experiments, the newest first.

        Args:
            filters: As in :meth:`zerolab.Client.experiments`.

        Returns:
            The experiments.

        Raises:
            ConfigError: If a filter is unknown or invalid.

        Example:
            >>> client = zerolab.Client()
            >>> project = client.create_project("listed")
            >>> len(project.list_experiments(state="COMPLETED"))
            0
        """
        return ObjectList(self._client.experiments(project=self.name, **filters))

    def edit(self, description: str | None = None, notes: str | None = None) -> Self:
        """Change its description or notes.

        Args:
            description: New description; None to keep it.
            notes: New notes; None to keep them.

        Returns:
            The project, updated.

        Example:
            >>> client = zerolab.Client()
            >>> client.create_project("edited").edit("Audio models").description
            'Audio models'
        """
        changes = {"description": description, "notes": notes}
        given = {key: value for key, value in changes.items() if value is not None}
        return self._update(self._client.patch_project(self.name, **given))

    def archive(self) -> Self:
        """Archive it: it accepts no new experiments and models.

        Returns:
            The project, updated.

        Raises:
            ConflictError: If it is the project ``default``.

        Example:
            >>> client = zerolab.Client()
            >>> client.create_project("old").archive().archived
            True
        """
        return self._update(self._client.patch_project(self.name, archived=True))

    def unarchive(self) -> Self:
        """Accept experiments and models again.

        Returns:
            The project, updated.

        Example:
            >>> client = zerolab.Client()
            >>> client.create_project("revived").archive().unarchive().archived
            False
        """
        return self._update(self._client.patch_project(self.name, archived=False))

    def restrict(self) -> Self:
        """Show it only to its owner, its members and administrators.

        Returns:
            The project, updated.

        Raises:
            ConflictError: If it is the project ``default``.

        Example:
            >>> client = zerolab.Client()
            >>> client.create_project("secret").restrict().restricted
            True
        """
        return self._update(self._client.patch_project(self.name, restricted=True))

    def unrestrict(self) -> Self:
        """Show it to all users again.

        Returns:
            The project, updated.

        Example:
            >>> client = zerolab.Client()
            >>> client.create_project("opened").restrict().unrestrict().restricted
            False
        """
        return self._update(self._client.patch_project(self.name, restricted=False))

    def members(self) -> list[str]:
        """List the owner and the members by name.

        Returns:
            The names, sorted.

        Example:
            >>> client = zerolab.Client()
            >>> client.create_project("shared").members()
            ['admin']
        """
        return [str(member["user"]) for member in self._client.project_members(self.name)]

    def add_member(self, user: str) -> Self:
        """Add a member; no effect if the user is one.

        Args:
            user: Name of the user.

        Returns:
            The project.

        Raises:
            ConfigError: If the user does not exist.

        Example:
            >>> client = zerolab.Client()
            >>> user = client.create_user("zoe", "member")
            >>> client.create_project("joint").add_member("zoe").members()
            ['admin', 'zoe']
        """
        self._client.add_project_member(self.name, user)
        return self

    def remove_member(self, user: str) -> Self:
        """Remove a member of the project.

        Args:
            user: Name of the user.

        Returns:
            The project.

        Raises:
            NotFoundError: If the user is no member.
            ConflictError: If the project belongs to the user.

        Example:
            >>> client = zerolab.Client()
            >>> user = client.create_user("leo", "member")
            >>> client.create_project("team").add_member("leo").remove_member("leo").members()
            ['admin']
        """
        self._client.remove_project_member(self.name, user)
        return self
