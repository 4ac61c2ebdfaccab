"""Trials of experiments."""

from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any, ClassVar, Self

from zerolab.client.objects.checkpoint import Checkpoint, require
from zerolab.client.objects.log_lines import LogLine, log_lines
from zerolab.client.objects.metrics_table import MetricsTable
from zerolab.client.objects.run import Run
from zerolab.client.objects.server_object import ServerObject
from zerolab.client.objects.table import ObjectList

__all__ = ["ENDED", "Trial"]

ENDED = frozenset({"COMPLETED", "CANCELED", "ERROR"})
"""Final states of experiments and trials."""


class Trial(ServerObject):
    """Training with one choice of hyperparameters.

    Example:
        >>> client = zerolab.Client()
        >>> trial = client.trial(1)
        >>> trial.hparams, trial.steps_completed, trial.best_validation
        ({'lr': 0.1}, 10, 0.01)
    """

    _shown: ClassVar = ("id", "state", "best_validation")
    _row: ClassVar = ("id", "state", "hparams", "steps_completed", "best_validation", "error")

    id: int
    """Id, from 1, unique over all experiments."""
    experiment_id: int
    """Its experiment."""
    state: str
    """``QUEUED``, ``RUNNING``, ``STOPPING``, ``PAUSED``, ``COMPLETED``, ``CANCELED`` or
    ``ERROR``."""
    hparams: dict[str, Any]
    """Hyperparameters chosen by the searcher."""
    seed: int
    """Seed chosen by the searcher."""
    restarts: int
    """Number of restarts after failures."""
    steps_completed: int
    """Number of trained batches."""
    progress: float
    """0 to 1."""
    activity: str | None
    """Activity of its run: ``starting``, ``training``, ``validating`` or ``checkpointing``."""
    waiting_reason: str | None
    """Why it has no slots while it is ``QUEUED``."""
    labels: list[str]
    """Names of log policies that matched its log."""
    archived: bool
    """Whether it is archived."""
    best_validation: float | None
    """Best value of the searcher's metric."""
    best_steps: int | None
    """Batch of the best validation."""
    latest_validation: float | None
    """Latest value of the searcher's metric."""
    slot_seconds: float
    """Cost so far: slots times seconds for which its runs held them."""
    source_trial_id: int | None
    """Trial from whose weights it starts."""
    source_checkpoint: str | None
    """Uuid of the checkpoint from which it starts."""
    run_id: int | None
    """Current run."""
    created_at: datetime
    """Time when the searcher created it."""
    started_at: datetime | None
    """Start time of its first run."""
    ended_at: datetime | None
    """End time."""
    error: str | None
    """One-line message for the user."""
    result_problem: str | None
    """Why it ended without a result; else None."""

    @property
    def has_ended(self) -> bool:
        """Whether its state is final, as far as it was read."""
        return self.state in ENDED

    def refresh(self) -> Self:
        """Read it again from the server.

        Returns:
            The trial, updated.

        Raises:
            NotFoundError: If it was deleted.

        Example:
            >>> client = zerolab.Client()
            >>> client.trial(1).refresh().state
            'COMPLETED'
        """
        return self._update(self._client.trial(self.id))

    def metrics(self, group: str | None = None, names: Sequence[str] = ()) -> MetricsTable:
        """Read all points of its metrics.

        Args:
            group: ``training``, ``validation`` or ``system``; None for all.
            names: Names of the metrics; all by default.

        Returns:
            The points; ``to_pandas``, ``to_polars`` and ``to_arrow`` convert them.

        Raises:
            NotFoundError: If the trial was deleted.

        Example:
            >>> client = zerolab.Client()
            >>> frame = client.trial(1).metrics("training", ["loss"]).to_pandas()
            >>> frame["value"].round(4).tolist()[:3]
            [0.1, 0.05, 0.0333]
        """
        series = self._client.metric_series(self.experiment_id, group, names, self.id)
        return MetricsTable(series)

    def logs(
        self,
        *,
        follow: bool = False,
        tail: int | None = None,
        rank: int | None = None,
        level: str | None = None,
    ) -> Iterator[LogLine]:
        """Yield its log lines.

        Args:
            follow: Wait for new lines until the trial has ended.
            tail: Begin with the last N lines.
            rank: Only lines of this rank.
            level: Only lines of this level.

        Yields:
            Lines in the order of their arrival.

        Raises:
            NotFoundError: If the trial was deleted.

        Example:
            >>> client = zerolab.Client()
            >>> for line in client.trial(1).logs(follow=True):
            ...     print(line)
            trained 10 batches
        """
        filters: dict[str, Any] = {"rank": rank, "level": level, "tail": tail}
        number, client = self.id, self._client
        return log_lines(
            client,
            lambda **page: client.trial_logs(number, **page),
            lambda: client.trial(number)["state"] in ENDED,
            follow=follow,
            **filters,
        )

    def runs(self) -> ObjectList[Run]:
        """List the runs of the trial, oldest first.

        Returns:
            The runs.

        Raises:
            NotFoundError: If the trial was deleted.

        Example:
            >>> client = zerolab.Client()
            >>> client.trial(1).runs()
            [Run(1, state='EXITED', exit_code=0)]
        """
        return ObjectList(Run(self._client, item) for item in self._client.runs(self.id))

    def checkpoints(self) -> ObjectList[Checkpoint]:
        """List the checkpoints of the trial.

        Returns:
            The checkpoints.

        Raises:
            NotFoundError: If the trial was deleted.

        Example:
            >>> client = zerolab.Client()
            >>> [checkpoint.steps_completed for checkpoint in client.trial(1).checkpoints()]
            [10]
        """
        items = self._client.trial_checkpoints(self.id)
        return ObjectList(Checkpoint(self._client, item) for item in items)

    def best_checkpoint(self) -> Checkpoint:
        """Return the checkpoint with the best validation at its step.

        Returns:
            The checkpoint.

        Raises:
            NotFoundError: If no checkpoint has a validation at its step.

        Example:
            >>> client = zerolab.Client()
            >>> client.trial(2).best_checkpoint().metrics
            {'loss': 0.02}
        """
        answer = self._client.trial_best_checkpoint(self.id)
        return require(self._client, answer, f"trial {self.id}")

    def kill(self) -> Self:
        """Stop it immediately, without a checkpoint.

        Returns:
            The trial, updated.

        Raises:
            NotFoundError: If it was deleted.

        Example:
            >>> client = zerolab.Client()
            >>> client.trial(1).kill().state  # it has ended: unchanged
            'COMPLETED'
        """
        return self._update(self._client.kill_trial(self.id))
