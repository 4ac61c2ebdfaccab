"""Projects."""

from zeroserver.api.rows import Resource, Time

__all__ = ["Project", "ProjectAnswer", "ProjectMember", "ProjectMembers", "ProjectPage"]


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
    restricted: bool
    """Whether only its owner, its members and administrators see it and what belongs to it."""
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


class ProjectMember(Resource, frozen=True):
    """User who sees a restricted project."""

    user: str
    """Name of the user."""
    owner: bool
    """Whether the project belongs to this user, who is always a member."""


class ProjectMembers(Resource, frozen=True):
    """Members of a project, sorted by name."""

    members: list[ProjectMember]
    next_after: None = None


class ProjectPage(Resource, frozen=True):
    """All projects, sorted by name."""

    projects: list[Project]
    next_after: None = None
