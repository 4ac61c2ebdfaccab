"""Plot of a metric over the batches of trials."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from zerolab.client.libraries import library
from zerolab.client.objects.metrics_table import MetricsTable
from zerolab.client.objects.server_object import display_text
from zerolab.client.objects.trial import Trial
from zerolab.contract.flatten import flatten_hparams
from zerolab.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["plot_curves"]

_LEGEND = 12
"""Maximum number of trials in the legend."""


def plot_curves(table: MetricsTable, trials: Sequence[Trial], metric: str, group: str) -> "Axes":
    """Plot a metric of trials; the first trials are in the legend.

    Raises:
        ConfigError: If matplotlib is not installed, or no trial has reported the metric.
    """
    pyplot = library("matplotlib.pyplot", "plot")
    if (group, metric) not in table.names:
        known = ", ".join(name for of, name in table.names if of == group) or "none"
        problem = f"metric: must be a reported metric of group {group} ({known}), got {metric!r}"
        raise ConfigError("plot", [problem])
    columns = table.columns()
    axes: Axes = pyplot.subplots()[1]
    labels = _labels(trials)
    for trial in trials:
        rows = (columns["trial_id"] == trial.id) & (columns["name"] == metric)
        if rows.any():
            steps, values = columns["step"][rows], columns["value"][rows]
            marker = "o" if len(steps) == 1 else ""
            axes.plot(steps, values, label=labels.get(trial.id), marker=marker)
    axes.set(xlabel="batch", ylabel=metric)
    axes.legend(fontsize="small")
    return axes


def _labels(trials: Sequence[Trial]) -> dict[int, str]:
    """Return the legend of the first trials: hyperparameters that differ between trials."""
    leaves = {trial.id: flatten_hparams(trial.hparams) for trial in trials}
    names = dict.fromkeys(name for values in leaves.values() for name in values)
    texts = {
        name: {number: display_text(values.get(name)) for number, values in leaves.items()}
        for name in names
    }
    differing = [name for name in names if len(set(texts[name].values())) > 1]
    labels = {}
    for trial in trials[:_LEGEND]:
        values = ", ".join(f"{name}={texts[name][trial.id]}" for name in differing)
        labels[trial.id] = f"trial {trial.id}{': ' if values else ''}{values}"
    return labels
