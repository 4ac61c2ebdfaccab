"""Title, text and JSON content of the message about an event."""

from typing import Any

import msgspec

from zerolab.contract.messages import wire_number
from zerolab.contract.notifications import EventName
from zerolab.contract.secret_text import mask_values
from zeroserver.api.rows import iso
from zeroserver.orchestrator.service import DomainEvent, DomainTransaction
from zeroserver.store.rows import ExperimentRow, TrialRow

__all__ = ["Message", "message_about", "test_message"]

_TEXT = 4000
"""Maximum length of the text of a message."""


class Message(msgspec.Struct, frozen=True):
    """Content of a message; the body of a webhook."""

    event: str
    time: str | None
    """Time of the event, in ISO 8601."""
    title: str
    text: str
    url: str
    """Address of the experiment in the web page."""
    experiment: dict[str, Any] | None
    trial: dict[str, Any] | None


def message_about(
    work: DomainTransaction, name: EventName, event: DomainEvent, server_url: str
) -> Message:
    """Return the message about an event, without secrets of the experiment.

    Args:
        work: Transaction of the event.
        name: Name of the event for channels.
        event: The event.
        server_url: Address of the server.
    """
    experiment = work.find(ExperimentRow, event.experiment_id)
    trial = None if event.trial_id is None else work.find(TrialRow, event.trial_id)
    secrets = work.secrets_of(experiment.id)
    title, text = _wording(name, event, experiment, trial)
    return Message(
        event=name,
        time=iso(work.clock()),
        title=mask_values(title, secrets),
        text=mask_values(text, secrets)[:_TEXT],
        url=f"{server_url}/#/experiments/{experiment.id}",
        experiment={
            "id": experiment.id,
            "name": experiment.name,
            "labels": msgspec.json.decode(experiment.labels),
            "state": experiment.state,
            "trials": experiment.num_trials,
            "failed_trials": experiment.failed_trials,
            "metric": experiment.metric or None,
            "best_validation": _number(experiment.best_validation),
        },
        trial=None
        if trial is None
        else {
            "id": trial.id,
            "state": trial.state,
            "restarts": trial.restarts,
            "batches": trial.steps_completed,
        },
    )


def test_message(channel: str, now: float, server_url: str) -> Message:
    """Return the message that a test of a channel sends.

    Args:
        channel: Name of the channel.
        now: Current time in seconds since 1970.
        server_url: Address of the server.
    """
    text = f"Channel {channel} receives messages of {server_url}."
    return Message(
        "test", iso(now), "Test of Zerolab's notifications", text, server_url, None, None
    )


def _wording(
    name: EventName, event: DomainEvent, experiment: ExperimentRow, trial: TrialRow | None
) -> tuple[str, str]:
    """Return title and text."""
    subject = f"Experiment {experiment.id} ({experiment.name})"
    if trial is not None:
        subject = f"Trial {trial.id} of experiment {experiment.id} ({experiment.name})"
    titles: dict[EventName, str] = {
        "finished": "finished",
        "failed": "failed",
        "canceled": "was canceled",
        "trial_failed": "failed",
        "alert": "",
        "restarts": "was restarted several times",
        "preempted": "was preempted several times",
        "log_pattern": "has a known problem in its log",
        "nan": "reports NaN",
        "improved": "has a new best result",
        "waiting": "waits for slots",
        "stalled": "reports nothing",
    }
    title = f"{subject}: {event.title}" if name == "alert" else f"{subject} {titles[name]}"
    text = _summary(experiment)
    if trial is not None or event.text:
        text = "\n".join(filter(None, [event.text, text]))
    return title, text


def _summary(experiment: ExperimentRow) -> str:
    """Return what is known of the experiment's result, in one or two lines."""
    lines = [experiment.error] if experiment.error else []
    if experiment.num_trials > 1:
        failed = f", {experiment.failed_trials} failed" if experiment.failed_trials else ""
        lines.append(f"{experiment.num_trials} trials{failed}")
    if experiment.best_validation is not None:
        lines.append(
            f"best {experiment.metric}: {experiment.best_validation:.6g} "
            f"(trial {experiment.best_trial_id})"
        )
    return "\n".join(lines)


def _number(value: float | None) -> float | str | None:
    return None if value is None else wire_number(value)
