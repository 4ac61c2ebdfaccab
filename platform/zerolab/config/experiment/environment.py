"""Variables that an experiment gives its ranks; without pydantic, for the agent reads them."""

from collections.abc import Mapping
from typing import Any

__all__ = ["variables_of"]


def variables_of(config: Mapping[str, Any], device: str) -> dict[str, str]:
    """The variables of ``environment.environment_variables`` for the ranks of a run.

    Args:
        config: An experiment's configuration that has been checked, as plain values.
        device: Of the run's slots: ``cpu``, or anything that starts with ``cuda``.
    """
    lines = (config.get("environment") or {}).get("environment_variables") or []
    if isinstance(lines, Mapping):
        lines = lines.get("cuda" if device.startswith("cuda") else "cpu") or []
    return dict(line.split("=", 1) for line in lines)
