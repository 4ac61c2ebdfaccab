"""Commands that describe, archive and delete experiments and trials."""

from typing import Annotated

import typer

from zerolab.cli.connection import ExperimentId, TrialId, connect
from zerolab.cli.groups import in_panel
from zerolab.cli.output import AsJson, Yes, print_done
from zerolab.errors import ConfigError

_ORGANIZE = in_panel("Organize")

__all__ = [
    "archive_experiment",
    "archive_trial",
    "change_experiment",
    "delete_experiment",
    "delete_trial",
    "unarchive_experiment",
    "unarchive_trial",
]


@_ORGANIZE
def change_experiment(
    experiment_id: ExperimentId,
    name: Annotated[str | None, typer.Option(metavar="NAME", help="New name.")] = None,
    description: Annotated[str | None, typer.Option(help="New description.")] = None,
    notes: Annotated[str | None, typer.Option(help="New notes.")] = None,
    label: Annotated[
        list[str] | None,
        typer.Option(metavar="LABEL", help="Replace all labels with this one. May be repeated."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Change the name, description, notes or labels.

    Example: zerolab experiment change 1 --label best
    """
    values = {"name": name, "description": description, "notes": notes, "labels": label}
    changes = {key: value for key, value in values.items() if value}
    if not changes:
        problem = "give at least one of --name, --description, --notes, --label"
        raise ConfigError("experiment change", [problem])
    with connect() as client:
        changed = client.patch_experiment(experiment_id, **changes)
    message = f"updated {' and '.join(changes)} of experiment {experiment_id}"
    print_done(changed, message, as_json=as_json)


@_ORGANIZE
def archive_experiment(experiment_id: ExperimentId, as_json: AsJson = False) -> None:
    """Hide an ended experiment from lists; its data is kept.

    Example: zerolab experiment archive 7
    """
    with connect() as client:
        changed = client.experiment_action(experiment_id, "archive")
    print_done(changed, f"experiment {experiment_id} is archived", as_json=as_json)


@_ORGANIZE
def unarchive_experiment(experiment_id: ExperimentId, as_json: AsJson = False) -> None:
    """Show an archived experiment in lists again.

    Example: zerolab experiment unarchive 7
    """
    with connect() as client:
        changed = client.experiment_action(experiment_id, "unarchive")
    print_done(changed, f"experiment {experiment_id} is no longer archived", as_json=as_json)


@_ORGANIZE
def delete_experiment(
    experiment_id: ExperimentId, yes: Yes = False, as_json: AsJson = False
) -> None:
    """Delete an experiment with its metrics, logs and checkpoints.

    The experiment must have ended.

    Example: zerolab experiment delete 7
    """
    _confirm_deletion(f"experiment {experiment_id}", yes)
    with connect() as client:
        client.delete_experiment(experiment_id)
    deleted = {"id": experiment_id, "deleted": True}
    print_done(deleted, f"experiment {experiment_id} is deleted", as_json=as_json)


@_ORGANIZE
def archive_trial(trial_id: TrialId, as_json: AsJson = False) -> None:
    """Hide an ended trial from lists; its data is kept.

    Example: zerolab trial archive 3
    """
    with connect() as client:
        changed = client.trial_action(trial_id, "archive")
    print_done(changed, f"trial {trial_id} is archived", as_json=as_json)


@_ORGANIZE
def unarchive_trial(trial_id: TrialId, as_json: AsJson = False) -> None:
    """Show an archived trial in lists again.

    Example: zerolab trial unarchive 3
    """
    with connect() as client:
        changed = client.trial_action(trial_id, "unarchive")
    print_done(changed, f"trial {trial_id} is no longer archived", as_json=as_json)


@_ORGANIZE
def delete_trial(trial_id: TrialId, yes: Yes = False, as_json: AsJson = False) -> None:
    """Delete a trial with its metrics, logs and checkpoints.

    The experiment must have ended.

    Example: zerolab trial delete 3
    """
    _confirm_deletion(f"trial {trial_id}", yes)
    with connect() as client:
        client.delete_trial(trial_id)
    deleted = {"id": trial_id, "deleted": True}
    print_done(deleted, f"trial {trial_id} is deleted", as_json=as_json)


def _confirm_deletion(subject: str, yes: bool) -> None:
    if not yes:
        text = f"Delete {subject} with its metrics, logs and checkpoints?"
        typer.confirm(text, abort=True, err=True)
