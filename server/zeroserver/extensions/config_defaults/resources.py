"""Resources of defaults."""

from typing import Any

from zeroserver.api.rows import Resource, Time
from zeroserver.store.config_defaults import Limits

__all__ = ["Defaults", "DefaultsAnswer"]


class Defaults(Resource, frozen=True):
    """Defaults and limits of the experiments of a project or of the installation."""

    project: str | None
    """Name of the project; null for the installation."""
    config: dict[str, Any]
    """Keys of the experiment file with their defaults; secrets are masked."""
    limits: Limits
    """`slots_per_trial`, `max_slots`, `priority` and `storage_gb`; null where there is no limit."""
    updated_at: Time | None
    """Time of the last change; null if none are set."""


class DefaultsAnswer(Resource, frozen=True):
    """Response with defaults."""

    defaults: Defaults
