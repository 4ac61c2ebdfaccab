"""Projects."""

from zeroserver.api.rows import Resource, Time

__all__ = ["Project", "ProjectAnswer", "ProjectPage"]


class Project(Resource, frozen=True):
    """Project, to which experiments and models belong."""

    name: str
    """Name; it cannot be changed."""
    description: str
    """Description in one line."""
    notes: str
    """Notes."""
    owner: str | None
    """User who created it; null while the installation has a single user."""
    archived: bool
    """Whether it accepts no new experiments and models."""
    experiments: int
    """Number of its experiments."""
    unfinished: int
    """Number of its experiments that have not ended."""
    models: int
    """Number of its models."""
    last_experiment_at: Time | None
    """Time of its last submission."""
    created_at: Time
    """Time of creation."""


class ProjectAnswer(Resource, frozen=True):
    """Response with one project."""

    project: Project


class ProjectPage(Resource, frozen=True):
    """All projects, sorted by name."""

    projects: list[Project]
    next_after: None = None
