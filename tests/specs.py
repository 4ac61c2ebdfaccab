"""What a run's specification says of an experiment, for runs that no server has made."""

from collections.abc import Mapping
from typing import Any

from zerolab.config import load_experiment
from zerolab.config.experiment.entrypoint import parse_entrypoint
from zerolab.config.experiment.run_spec import sections_of

SEARCHER = {"name": "single", "metric": "validation_loss"}


def sections(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a RunSpec that come from an experiment's configuration.

    Args:
        config: As much of an experiment file as matters; the rest is filled in.
    """
    searcher = {**SEARCHER, **config.get("searcher", {})}
    # As a command, for which a length need not be given.
    file = {**config, "entrypoint": "python script.py", "searcher": searcher}
    entrypoint = parse_entrypoint(config.get("entrypoint", "model:Trial"))
    return {
        **sections_of(load_experiment(file)), "entrypoint": entrypoint, "config": dict(config),
    }  # fmt: skip
