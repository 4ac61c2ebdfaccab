"""Command ``zerolab experiment continue``."""

from zerolab.cli.config_overrides import ChangesFiles, Paused, Values, read_changes
from zerolab.cli.connection import ExperimentId
from zerolab.cli.groups import in_panel
from zerolab.cli.output import AsJson, print_done

__all__ = ["continue_experiment"]


@in_panel("Control")
def continue_experiment(
    experiment_id: ExperimentId,
    config: ChangesFiles = None,
    values: Values = None,
    paused: Paused = False,
    as_json: AsJson = False,
) -> None:
    """Train an ended experiment further, from its checkpoints.

    Give it a greater length or more trials, or retry failed trials. A paused experiment needs
    `activate` instead.

    Example: zerolab experiment continue 1 --set searcher.max_length.batches=2000
    """
    from zerolab.cli.connection import connect

    changes = read_changes(config, values, paused=paused)
    with connect() as client:
        experiment = client.experiment_action(experiment_id, "continue", changes)
    message = f"experiment {experiment_id} continues: {experiment['state']}"
    print_done(experiment, message, as_json=as_json)
