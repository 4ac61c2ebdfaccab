"""Command ``zerolab experiment continue``."""

from zerolab.cli.config_overrides import ChangesFile, Paused, Values, read_changes
from zerolab.cli.connection import ExperimentId
from zerolab.cli.output import print_message

__all__ = ["continue_experiment"]


def continue_experiment(
    experiment_id: ExperimentId,
    config: ChangesFile = None,
    values: Values = None,
    paused: Paused = False,
) -> None:
    """Continue an ended experiment from its checkpoints, with changes.

    Example: zerolab experiment continue 1 --set searcher.max_length.batches=2000
    """
    from zerolab.cli.connection import connect

    changes = read_changes(config, values, paused=paused)
    with connect() as client:
        experiment = client.experiment_action(experiment_id, "continue", changes)
    print_message(f"experiment {experiment_id} goes on: it is {experiment['state']}")
