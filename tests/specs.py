"""Experiment sections of run specifications, for runs without a server."""

from collections.abc import Mapping
from typing import Any

from zerolab.config import load_experiment
from zerolab.config.experiment.entrypoint import parse_entrypoint
from zerolab.config.experiment.run_spec import run_spec_fields

SEARCHER = {"name": "single", "metric": "validation_loss"}


def sections(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a RunSpec that come from an experiment's configuration.

    Args:
        config: Relevant keys of an experiment file; the others get defaults.
    """
    searcher = {**SEARCHER, **config.get("searcher", {})}
    # A command needs no length.
    content = {**config, "entrypoint": "python script.py", "searcher": searcher}
    entrypoint = parse_entrypoint(config.get("entrypoint", "model:Trial"))
    return {
        **run_spec_fields(load_experiment(content)),
        "entrypoint": entrypoint, "config": dict(config),
    }  # fmt: skip
