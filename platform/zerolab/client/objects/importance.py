"""Importance of hyperparameters."""

from typing import Any, ClassVar

from zerolab.client.objects.server_object import ServerObject
from zerolab.client.objects.table import html_rows

__all__ = ["Importance"]


class Importance(ServerObject):
    """Importance of the hyperparameters for the searcher's metric.

    Example:
        >>> client = zerolab.Client()
        >>> importance = client.experiment(1).importance()
        >>> importance.trials, importance.by_name
        (2, {})
        >>> importance.problem
        '...'
    """

    _shown: ClassVar = ("shares", "explained")

    method: str
    """Description of the method and its limits."""
    trials: int
    """Number of trials with a result."""
    explained: float | None
    """Out-of-bag R2: share of the variance that the hyperparameters predict for unseen trials.
    Below 0.2 the shares mean little."""
    shares: list[dict[str, Any]]
    """Dicts with ``name``, ``importance`` and ``spread``, the largest first."""
    problem: str | None
    """Why there is no result; else None."""

    @property
    def by_name(self) -> dict[str, float]:
        """Importance of each hyperparameter, the largest first."""
        return {share["name"]: float(share["importance"]) for share in self["shares"]}

    def _repr_html_(self) -> str:
        if self["problem"]:
            return super()._repr_html_()
        return html_rows(("name", "importance", "spread"), self["shares"])
