"""Defaults and limits of experiments, of the installation and of projects, in memory."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import msgspec
from sqlalchemy import Connection, func, select

from zerolab.contract.secrets import find_secrets
from zerolab.errors import ConfigError
from zerolab.formatting import size_text
from zeroserver.store.project_directory import ProjectDirectory
from zeroserver.store.schema import (
    checkpoints,
    config_defaults,
    experiments,
    media,
    projects,
    trials,
)

if TYPE_CHECKING:  # loaded with the first experiment
    from zerolab.config.experiment.experiment_config import ExperimentConfig

__all__ = ["INSTALLATION", "ConfigDefaults", "DefaultsDirectory", "Limits"]

INSTALLATION = 0
"""Scope of the installation; other scopes are ids of projects."""


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Limits of experiments at their submission, and of changes of jobs by members."""

    slots_per_trial: int | None = None
    max_slots: int | None = None
    """Maximum number of slots that the trials of an experiment hold together."""
    priority: int | None = None
    """Least value of ``resources.priority``; smaller values run first."""
    storage_gb: float | None = None
    """Size of stored checkpoints and media, in 10^9 bytes, from which no experiment is created."""


class ConfigDefaults(msgspec.Struct, frozen=True):
    """Defaults and limits of one scope."""

    config: dict[str, Any]
    limits: Limits
    updated_at: float


class DefaultsDirectory:
    """Defaults and limits by scope; entries are replaced, never modified.

    Args:
        projects: Projects of the installation.
    """

    def __init__(self, projects: ProjectDirectory) -> None:
        self._projects = projects
        self._scopes: dict[int, ConfigDefaults] = {}

    def load(self, connection: Connection) -> None:
        """Read all of them; called once, at startup."""
        for row in connection.execute(select(config_defaults)):
            content = msgspec.json.decode(row.content)
            limits = msgspec.convert(content["limits"], Limits)
            self.put(row.scope, ConfigDefaults(content["config"], limits, row.updated_at))

    def put(self, scope: int, defaults: ConfigDefaults | None) -> None:
        """Replace the defaults of a scope, or remove them, after their transaction."""
        others = {key: value for key, value in self._scopes.items() if key != scope}
        self._scopes = others if defaults is None else {**others, scope: defaults}

    def get(self, scope: int) -> ConfigDefaults | None:
        """Return the defaults of a scope; None if there are none."""
        return self._scopes.get(scope)

    def fill(self, raw: Mapping[str, Any]) -> Mapping[str, Any]:
        """Merge the defaults below a submitted configuration.

        Values of the configuration override those of its project, which override those of the
        installation. Environment variables are combined. A block with another ``type`` than the
        default's is not merged. ``null`` keeps the built-in default.

        Args:
            raw: The configuration as it was submitted; not yet checked.
        """
        for _, defaults in self._of_project(raw.get("project")):
            raw = _fill(raw, defaults.config)
        return raw

    def has_secrets(self, raw: Mapping[str, Any]) -> bool:
        """Return whether a stored configuration has secrets that are not those of the defaults."""
        common = {
            secret
            for _, defaults in self._of_project(raw.get("project"))
            for secret in find_secrets(defaults.config)
        }
        return any(secret not in common for secret in find_secrets(raw))

    def limit(self, config: "ExperimentConfig") -> "ExperimentConfig":
        """Apply the limits of an experiment's project and of the installation.

        Returns:
            The configuration; ``max_slots`` is that of the limits if it has none.

        Raises:
            ConfigError: If it exceeds a limit; all problems at once.
        """
        resources = config.resources
        problems: list[str] = []
        most = resources.max_slots
        for scope, defaults in self._of_project(config.project):
            limits = defaults.limits
            problems += limit_problems(
                limits, scope, slots=resources.slots_per_trial, max_slots=resources.max_slots,
                priority=resources.priority,
            )  # fmt: skip
            if resources.max_slots is None and limits.max_slots is not None:
                most = limits.max_slots if most is None else min(most, limits.max_slots)
        if problems:
            raise ConfigError("experiment", problems)
        if most == resources.max_slots:
            return config
        limited = resources.model_copy(update={"max_slots": most})
        return config.model_copy(update={"resources": limited})

    def check_storage(self, connection: Connection, project_id: int) -> None:
        """Check whether a project may have another experiment.

        Args:
            connection: Database connection.
            project_id: The project.

        Raises:
            ConfigError: If the project or the installation has reached a limit of its storage.
        """
        # The project may be created by the same transaction, so it is not in the directory yet.
        name = connection.scalar(select(projects.c.name).where(projects.c.id == project_id))
        for scope, defaults in self._of_project(str(name)):
            limit = defaults.limits.storage_gb
            if limit is None:
                continue
            whole = defaults is self.get(INSTALLATION)
            size = _stored_bytes(connection, None if whole else project_id)
            if size >= limit * 1e9:
                problem = f"checkpoint_storage: must be below {limit:g} GB (policy of {scope})"
                advice = "delete checkpoints, or ask an administrator"
                raise ConfigError("experiment", [f"{problem}, got {size_text(size)}; {advice}"])

    def check_job(
        self, project_id: int, *, priority: int | None, max_slots: int | None, unlimited: bool
    ) -> None:
        """Check a change of a job in the queue.

        Raises:
            ConfigError: If it exceeds a limit.
        """
        problems: list[str] = []
        for scope, defaults in self._of_project(self._projects.name_of(project_id)):
            most = defaults.limits.max_slots
            if unlimited and most is not None:
                problems.append(
                    f"resources.max_slots: must be at most {most} (policy of {scope}), got no limit"
                )
            problems += limit_problems(
                defaults.limits, scope, slots=None, max_slots=max_slots, priority=priority
            )
        if problems:
            raise ConfigError("request", problems)

    def _of_project(self, name: Any) -> Iterator[tuple[str, ConfigDefaults]]:
        """Yield the defaults of a project, if it exists, and of the installation."""
        if not self._scopes:
            return
        project = self._projects.find(name or "default") if isinstance(name, str | None) else None
        if project is not None and (defaults := self.get(project.id)) is not None:
            yield f"project {project.name}", defaults
        if (defaults := self.get(INSTALLATION)) is not None:
            yield "the installation", defaults


def _stored_bytes(connection: Connection, project_id: int | None) -> int:
    """Return the size of the checkpoints and media of a project, or of all."""
    stored = (
        select(func.sum(checkpoints.c.size_bytes))
        .join(experiments, experiments.c.id == checkpoints.c.experiment_id)
        .where(checkpoints.c.state == "COMPLETED")
    )
    files = (
        select(func.sum(media.c.size))
        .join(trials, trials.c.id == media.c.trial_id)
        .join(experiments, experiments.c.id == trials.c.experiment_id)
    )
    total = 0
    for query in (stored, files):
        if project_id is not None:
            query = query.where(experiments.c.project_id == project_id)  # noqa: PLW2901
        total += int(connection.scalar(query) or 0)
    return total


def limit_problems(
    limits: Limits, scope: str, *, slots: int | None, max_slots: int | None, priority: int | None
) -> Iterator[str]:
    """Yield a problem for each value above its limit."""
    advice = "or ask an administrator"
    bounds = [bound for bound in (limits.slots_per_trial, limits.max_slots) if bound is not None]
    for key, value, most in (
        ("slots_per_trial", slots, min(bounds, default=None)),
        ("max_slots", max_slots, limits.max_slots),
    ):
        if value is not None and most is not None and value > most:
            problem = f"resources.{key}: must be at most {most} (policy of {scope}), got {value}"
            yield f"{problem}; use fewer slots, {advice}"
    least = limits.priority
    if priority is not None and least is not None and priority < least:
        problem = f"resources.priority: must be at least {least} (policy of {scope})"
        yield f"{problem}, got {priority}; smaller values run first; use a larger one, {advice}"


_VARIABLES = "environment_variables"


def _fill(raw: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Add missing keys; recursion ends at the depth of the defaults."""
    result = dict(raw)
    for key, default in defaults.items():
        value = result.get(key)
        if key not in result:
            result[key] = default
        elif key == _VARIABLES:
            result[key] = _combine(value, default)
        elif isinstance(value, Mapping) and isinstance(default, Mapping):
            same = value.get("type", default.get("type")) == default.get("type")
            result[key] = _fill(value, default) if same else value
    return result


def _combine(value: Any, default: Any) -> Any:
    """Combine lists of environment variables; a variable of the same name is replaced."""
    if isinstance(value, list) and isinstance(default, list):
        names = {line.partition("=")[0] for line in value if isinstance(line, str)}
        return [line for line in default if line.partition("=")[0] not in names] + value
    if isinstance(value, Mapping) or (isinstance(default, Mapping) and isinstance(value, list)):
        own, other = (
            side if isinstance(side, Mapping) else {"cpu": side, "cuda": side}
            for side in (value, default)
        )
        kinds = {**other, **own}
        return {kind: _combine(own.get(kind, []), other.get(kind, [])) for kind in kinds}
    return value
