"""Commands that describe, archive and delete experiments and trials."""

from typing import Annotated

import typer

from zerolab.cli.connection import ExperimentId, TrialId, connect
from zerolab.cli.output import Yes, print_message
from zerolab.errors import ConfigError

__all__ = [
    "archive_experiment",
    "archive_trial",
    "change_experiment",
    "delete_experiment",
    "delete_trial",
    "unarchive_experiment",
    "unarchive_trial",
]


def change_experiment(
    experiment_id: ExperimentId,
    name: Annotated[str | None, typer.Option(help="New name.")] = None,
    description: Annotated[str | None, typer.Option(help="New description.")] = None,
    notes: Annotated[str | None, typer.Option(help="New notes.")] = None,
    label: Annotated[
        list[str] | None, typer.Option(help="Label; may be repeated; replaces all labels.")
    ] = None,
) -> None:
    """Change the name, description, notes or labels.

    Example: change 1 --label best
    """
    values = {"name": name, "description": description, "notes": notes, "labels": label}
    changes = {key: value for key, value in values.items() if value}
    if not changes:
        problem = "give at least one of --name, --description, --notes, --label"
        raise ConfigError("zerolab experiment change", [problem])
    with connect() as client:
        client.patch_experiment(experiment_id, **changes)
    print_message(f"experiment {experiment_id} is changed")


def archive_experiment(experiment_id: ExperimentId) -> None:
    """Archive an ended experiment: lists omit it, its data is kept."""
    with connect() as client:
        client.experiment_action(experiment_id, "archive")
    print_message(f"experiment {experiment_id} is archived")


def unarchive_experiment(experiment_id: ExperimentId) -> None:
    """Unarchive an experiment: lists show it again."""
    with connect() as client:
        client.experiment_action(experiment_id, "unarchive")
    print_message(f"experiment {experiment_id} is not archived any more")


def delete_experiment(experiment_id: ExperimentId, yes: Yes = False) -> None:
    """Delete an ended experiment with its metrics, logs and checkpoints."""
    _confirm_deletion(f"experiment {experiment_id}", yes)
    with connect() as client:
        client.delete_experiment(experiment_id)
    print_message(f"experiment {experiment_id} is deleted")


def archive_trial(trial_id: TrialId) -> None:
    """Archive an ended trial: lists omit it, its data is kept."""
    with connect() as client:
        client.trial_action(trial_id, "archive")
    print_message(f"trial {trial_id} is archived")


def unarchive_trial(trial_id: TrialId) -> None:
    """Unarchive a trial: lists show it again."""
    with connect() as client:
        client.trial_action(trial_id, "unarchive")
    print_message(f"trial {trial_id} is not archived any more")


def delete_trial(trial_id: TrialId, yes: Yes = False) -> None:
    """Delete a trial of an ended experiment with its metrics, logs and checkpoints."""
    _confirm_deletion(f"trial {trial_id}", yes)
    with connect() as client:
        client.delete_trial(trial_id)
    print_message(f"trial {trial_id} is deleted")


def _confirm_deletion(subject: str, yes: bool) -> None:
    if not yes:
        text = f"Delete {subject} with its metrics, logs and checkpoints?"
        typer.confirm(text, abort=True, err=True)
