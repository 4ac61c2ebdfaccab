"""Experiments: state, trials, metrics, logs and checkpoints."""

import time
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, ClassVar, Self

from zerolab.client.objects.checkpoint import Checkpoint, require
from zerolab.client.objects.importance import Importance
from zerolab.client.objects.log_lines import POLL_S, LogLine, log_lines
from zerolab.client.objects.metrics_table import MetricsTable
from zerolab.client.objects.progress_bar import Progress, show_progress
from zerolab.client.objects.server_object import ServerObject
from zerolab.client.objects.table import ObjectList
from zerolab.client.objects.trial import ENDED, Trial
from zerolab.errors import NotFoundError, WaitTimeoutError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["Condition", "Experiment"]

Condition = tuple[str, str, Any] | list[Any]
"""Column, operator and value, such as ``("hparams.lr", "<", 0.1)``."""


class Experiment(ServerObject):
    """Searcher and trials of one experiment file.

    Example:
        >>> client = zerolab.Client()
        >>> experiment = client.experiment(1).wait()
        >>> experiment.state, experiment.num_trials, experiment.best_validation
        ('COMPLETED', 2, 0.01)
        >>> experiment.best_trial().hparams
        {'lr': 0.1}
    """

    _shown: ClassVar = ("id", "name", "state")
    _row: ClassVar = (
        "id", "name", "state", "progress", "num_trials", "best_trial_id", "metric",
        "best_validation", "waiting_reason", "error",
    )  # fmt: skip

    id: int
    """Id, from 1."""
    name: str
    """Name; can be changed."""
    description: str
    """Description; can be changed."""
    labels: list[str]
    """Labels; can be changed."""
    notes: str
    """Notes; can be changed."""
    state: str
    """``ACTIVE``, ``PAUSED``, ``STOPPING_...``, ``COMPLETED``, ``CANCELED`` or ``ERROR``."""
    config: dict[str, Any]
    """Complete configuration with defaults and the chosen seed."""
    progress: float
    """0 to 1."""
    created_at: datetime
    """Time of submission."""
    started_at: datetime | None
    """Start time of its first run."""
    ended_at: datetime | None
    """End time."""
    owner: str | None
    """User to whom it belongs; None while the installation has a single user."""
    project: str | None
    """Its project; None if the installation has only one project."""
    archived: bool
    """Whether it is archived."""
    test_mode: bool
    """Whether it was submitted with ``test``."""
    forked_from: int | None
    """Id of the original experiment of a fork."""
    source_checkpoint: str | None
    """Uuid of the checkpoint from which its trials start."""
    searcher_name: str
    """Name of the searcher."""
    metric: str | None
    """Validation metric that compares trials; None for a single trial without one."""
    smaller_is_better: bool
    """Whether smaller values of the metric are better."""
    num_trials: int
    """Number of trials created so far."""
    failed_trials: int
    """Number of trials that ended with an error."""
    canceled_trials: int
    """Number of canceled trials."""
    best_trial_id: int | None
    """Best trial so far."""
    best_validation: float | None
    """Metric of the best trial."""
    waiting_reason: str | None
    """Why none of its trials runs while it is ``ACTIVE``; else None."""
    error: str | None
    """One-line error if it failed or no trial has a result."""
    result_problem: str | None
    """Why it ended without a result; else None."""
    metrics_expired_at: datetime | None
    """Time at which most values of its training and system metrics were removed
    (``retention_policy.metric_retention_days``); None if all are stored."""
    unread_hparams: list[str]
    """Searched hyperparameters that no trial has read; empty while unknown."""

    @property
    def has_ended(self) -> bool:
        """Whether its state is final, as far as it was read."""
        return self.state in ENDED

    def refresh(self) -> Self:
        """Read it again from the server.

        Returns:
            The experiment, updated.

        Raises:
            NotFoundError: If it was deleted.

        Example:
            >>> client = zerolab.Client()
            >>> client.experiment(1).refresh().state
            'COMPLETED'
        """
        return self._update(self._client.experiment(self.id))

    def wait(self, timeout_s: float | None = None, *, progress: bool = False) -> Self:
        """Wait until it has ended: ``COMPLETED``, ``CANCELED`` or ``ERROR``.

        Args:
            timeout_s: Maximum wait in seconds; None for any time.
            progress: Show a progress bar in a notebook or on a terminal, and lines elsewhere.

        Returns:
            The experiment, updated.

        Raises:
            WaitTimeoutError: If it has not ended in time; it continues.
            NotFoundError: If it was deleted.

        Example:
            >>> client = zerolab.Client()
            >>> client.experiment(1).wait(timeout_s=60).state
            'COMPLETED'
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with show_progress(f"experiment {self.id}", shown=progress) as show:
            while True:
                self.refresh()
                show(self._progress())
                if self.has_ended:
                    return self
                if deadline is not None and time.monotonic() > deadline:
                    reason = f": {self.waiting_reason}" if self.waiting_reason else ""
                    state = f"{self.state}, {100 * self.progress:.0f} % done{reason}"
                    msg = f"experiment {self.id} has not ended after {timeout_s:g} s ({state})"
                    raise WaitTimeoutError(f"{msg}; it continues: wait again, or cancel it")
                time.sleep(POLL_S)

    def trials(
        self,
        *,
        where: Sequence[Condition] = (),
        sort: str | None = None,
        limit: int | None = None,
        state: str | None = None,
    ) -> ObjectList[Trial]:
        """List its trials, the oldest first.

        Args:
            where: Conditions of column, operator (``=``, ``!=``, ``<``, ``<=``, ``>``, ``>=``,
                ``in`` or ``contains``) and value, which all must hold. Columns are fields of a
                trial, ``hparams.NAME``, and metrics such as ``min.validation.loss``.
            sort: ``metric`` for the best first, or a column, with ``-`` before it for descending
                order.
            limit: Maximum number of trials.
            state: Only trials in this state.

        Returns:
            The trials.

        Raises:
            ConfigError: If a condition or column is unknown.

        Example:
            >>> client = zerolab.Client()
            >>> client.experiment(1).trials(where=[("hparams.lr", ">", 0.15)], sort="metric")
            [Trial(2, state='COMPLETED', best_validation=0.02)]
        """
        filters: dict[str, Any] = {"sort": sort, "limit": limit, "state": state}
        items = self._client.trials(self.id, where=list(where) or None, **filters)
        return ObjectList(Trial(self._client, item) for item in items)

    def best_trial(self) -> Trial:
        """Return the trial with the best validation.

        Returns:
            The trial.

        Raises:
            NotFoundError: If no trial has a result yet.

        Example:
            >>> client = zerolab.Client()
            >>> client.experiment(1).best_trial()
            Trial(1, state='COMPLETED', best_validation=0.01)
        """
        if not self.has_ended:
            self.refresh()
        if self.best_trial_id is None:
            reason = self.error or self.result_problem or f"its state is {self.state}"
            raise NotFoundError(f"no trial of experiment {self.id} has a result: {reason}")
        return Trial(self._client, self._client.trial(self.best_trial_id))

    def best_checkpoint(self) -> Checkpoint:
        """Return the checkpoint with the best validation at its step.

        Returns:
            The checkpoint.

        Raises:
            NotFoundError: If no checkpoint has a validation at its step.

        Example:
            >>> client = zerolab.Client()
            >>> client.experiment(1).best_checkpoint().trial_id
            1
        """
        answer = self._client.best_checkpoint(self.id)
        return require(self._client, answer, f"experiment {self.id}")

    def checkpoints(self) -> ObjectList[Checkpoint]:
        """List the checkpoints of its trials.

        Returns:
            The checkpoints.

        Raises:
            NotFoundError: If the experiment was deleted.

        Example:
            >>> client = zerolab.Client()
            >>> sorted(checkpoint.trial_id for checkpoint in client.experiment(1).checkpoints())
            [1, 2]
        """
        items = self._client.experiment_checkpoints(self.id)
        return ObjectList(Checkpoint(self._client, item) for item in items)

    def metrics(self, group: str | None = None, names: Sequence[str] = ()) -> MetricsTable:
        """Read all points of the metrics of all trials.

        Args:
            group: ``training``, ``validation`` or ``system``; None for all.
            names: Names of the metrics; all by default.

        Returns:
            The points; ``to_pandas``, ``to_polars`` and ``to_arrow`` convert them.

        Raises:
            NotFoundError: If the experiment was deleted.

        Example:
            >>> client = zerolab.Client()
            >>> client.experiment(1).metrics("training", ["loss"])
            MetricsTable(20 points of 1 metrics)
        """
        return MetricsTable(self._client.metric_series(self.id, group, names))

    def logs(
        self,
        *,
        follow: bool = False,
        tail: int | None = None,
        rank: int | None = None,
        level: str | None = None,
    ) -> Iterator[LogLine]:
        """Yield the log lines of all trials.

        Args:
            follow: Wait for new lines until the experiment has ended.
            tail: Begin with the last N lines.
            rank: Only lines of this rank.
            level: Only lines of this level.

        Yields:
            Lines in the order of their arrival.

        Raises:
            NotFoundError: If the experiment was deleted.

        Example:
            >>> client = zerolab.Client()
            >>> [line.text for line in client.experiment(1).logs(rank=0)]
            ['trained 10 batches', 'trained 10 batches']
        """
        filters: dict[str, Any] = {"rank": rank, "level": level, "tail": tail}
        number, client = self.id, self._client
        return log_lines(
            client,
            lambda **page: client.experiment_logs(number, **page),
            lambda: client.experiment(number)["state"] in ENDED,
            follow=follow,
            **filters,
        )

    def importance(self) -> Importance:
        """Compute the importance of the hyperparameters for the metric.

        Returns:
            The shares; ``problem`` says why there are none.

        Raises:
            NotFoundError: If the experiment was deleted.

        Example:
            >>> client = zerolab.Client()
            >>> client.experiment(1).importance().trials
            2
        """
        return Importance(self._client, self._client.get(f"/experiments/{self.id}/importance"))

    def plot(self, metric: str | None = None, group: str = "validation") -> "Axes":
        """Plot a metric of all trials over the batches, with matplotlib.

        Args:
            metric: Name of the metric; the searcher's by default.
            group: ``training``, ``validation`` or ``system``.

        Returns:
            Axes with one line for each trial. The legend has the hyperparameters that differ.

        Raises:
            ConfigError: If matplotlib is not installed, or no trial has reported the metric.

        Example:
            >>> client = zerolab.Client()
            >>> axes = client.experiment(1).plot("loss", group="training")
            >>> [line.get_label() for line in axes.lines]
            ['trial 1: lr=0.1', 'trial 2: lr=0.2']
        """
        from zerolab.client.objects.plot import plot_curves

        trials = self.trials(sort="metric" if self.metric else None)
        axes = plot_curves(self.metrics(group), trials, metric or self.metric or "", group)
        axes.set_title(self.name)
        return axes

    def change(self, **changes: Any) -> Self:
        """Change its name, description, labels, notes or archive.

        Args:
            changes: As for :meth:`zerolab.Client.patch_experiment`.

        Returns:
            The experiment, updated.

        Raises:
            ConfigError: If a value is invalid.

        Example:
            >>> client = zerolab.Client()
            >>> client.experiment(1).change(labels=["baseline"]).labels
            ['baseline']
        """
        return self._update(self._client.patch_experiment(self.id, **changes))

    def pause(self) -> Self:
        """Save checkpoints and free the slots until it is activated.

        Returns:
            The experiment, updated.

        Raises:
            ConflictError: If its state does not allow it.

        Example:
            >>> client = zerolab.Client()
            >>> waiting = client.submit("model", {"entrypoint": "python train.py",
            ...     "hyperparameters": {"lr": 0.1}, "searcher": {"name": "single"}})
            >>> waiting.pause().state, waiting.activate().state, waiting.kill().state
            ('PAUSED', 'ACTIVE', 'CANCELED')
        """
        return self._act("pause")

    def activate(self) -> Self:
        """Continue after a pause.

        Returns:
            The experiment, updated.

        Raises:
            ConflictError: If its state does not allow it.

        Example:
            >>> client = zerolab.Client()
            >>> try:
            ...     client.experiment(1).activate()
            ... except zerolab.errors.ConflictError as error:
            ...     print(error)
            experiment 1: is COMPLETED and cannot be activated; ...
        """
        return self._act("activate")

    def cancel(self) -> Self:
        """Stop it after a last checkpoint of each trial.

        Returns:
            The experiment, updated.

        Raises:
            NotFoundError: If it was deleted.

        Example:
            >>> client = zerolab.Client()
            >>> client.experiment(1).cancel().state  # it has ended: unchanged
            'COMPLETED'
        """
        return self._act("cancel")

    def kill(self) -> Self:
        """Stop it immediately, without checkpoints.

        Returns:
            The experiment, updated.

        Raises:
            NotFoundError: If it was deleted.

        Example:
            >>> client = zerolab.Client()
            >>> client.experiment(1).kill().state  # it has ended: unchanged
            'COMPLETED'
        """
        return self._act("kill")

    def _progress(self) -> Progress:
        parts = [f"{self.num_trials} trials", self.state.lower().replace("_", " ")]
        if self.best_validation is not None:
            parts.append(f"best {self.metric} {self.best_validation:.4g}")
        if self.waiting_reason:
            parts.append(f"waits: {self.waiting_reason}")
        return Progress(self.progress, ", ".join(parts), has_ended=self.has_ended)

    def _act(self, action: str) -> Self:
        return self._update(self._client.experiment_action(self.id, action))
