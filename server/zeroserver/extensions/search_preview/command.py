"""Command ``zerolab experiment preview``: estimate of a search (dry run)."""

import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zerolab.cli.connection import id_option
from zerolab.cli.groups import in_panel
from zerolab.cli.output import AsJson, print_json, print_table, print_warnings, result

if TYPE_CHECKING:
    from zeroserver.extensions.search_preview.estimate import Preview

__all__ = ["preview"]

_WIDTH = 100


@in_panel("Inspect")
def preview(
    config: Annotated[
        Path,
        typer.Argument(help="Experiment file, or a folder that contains an experiment.yaml."),
    ],
    seconds_per_batch: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="Duration of one batch of a trial.")
    ] = None,
    seconds_per_epoch: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="Duration of one epoch of a trial.")
    ] = None,
    like: Annotated[
        int | None,
        id_option(
            "experiment",
            "--like",
            text="Use the measured duration of a batch of this experiment. Needs the server.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Estimate the trials and the cost of a search (dry run).

    It starts nothing. It needs a server only with --like.

    Example: zerolab experiment preview experiment.yaml --seconds-per-batch 0.05
    """
    times = {"seconds_per_batch": seconds_per_batch, "seconds_per_epoch": seconds_per_epoch}
    known_times = {name: value for name, value in times.items() if value is not None}
    _check(known_times, like)
    from zerolab.config.files import experiment_file

    file = experiment_file(config)
    estimate = (
        _server_estimate(file, like) if like is not None else _local_estimate(file, known_times)
    )
    print_warnings(estimate)
    if as_json:
        print_json(estimate)
        return
    _show(estimate)


def _check(known_times: Mapping[str, float], like: int | None) -> None:
    from zerolab.errors import ConfigError

    options = {f"--{name.replace('_', '-')}": value for name, value in known_times.items()}
    problems = [
        f"{option}: must be above 0, got {value:g}"
        for option, value in options.items()
        if not 0 < value < float("inf")
    ]
    named = [*options, *(["--like"] if like is not None else [])]
    if len(named) > 1:
        problems.append(f"{named[0]}: cannot be combined, got {' and '.join(named)}")
    if problems:
        raise ConfigError("zerolab experiment preview", problems)


def _local_estimate(file: Path, known_times: Mapping[str, float]) -> dict[str, Any]:
    from zerolab.config.experiment.experiment_config import load_experiment
    from zeroserver.extensions.search_preview.estimate import estimate_search

    seconds = known_times.get("seconds_per_batch"), known_times.get("seconds_per_epoch")
    config = load_experiment(file)
    return _to_resource(
        estimate_search(config, seconds_per_batch=seconds[0], seconds_per_epoch=seconds[1])
    )


def _server_estimate(file: Path, like: int) -> dict[str, Any]:
    from zerolab.cli.connection import connect
    from zerolab.config.experiment.experiment_config import load_experiment
    from zerolab.config.experiment.layers import read_experiment

    load_experiment(file)  # reports errors with the file's name
    with connect() as client:
        return client.preview(read_experiment(file), like=like)


def _to_resource(estimate: "Preview") -> dict[str, Any]:
    """Convert a preview to the server's resource."""
    return {
        "outline": estimate.outline,
        "trials": estimate.trials,
        "unit": estimate.unit,
        "lengths": [
            {"length": length, "trials": number}
            for length, number in sorted(estimate.lengths.items())
        ],
        "total_length": estimate.total_length,
        "most_length": estimate.most_length,
        "slots_per_trial": estimate.slots,
        "seconds_per_unit": estimate.seconds_per_unit,
        "like": estimate.like,
        "slot_hours": estimate.slot_hours,
        "most_slot_hours": estimate.most_slot_hours,
        "premise": estimate.premise,
        "warnings": list(estimate.warnings),
    }


def _show(estimate: Mapping[str, Any]) -> None:
    unit, slots = estimate["unit"], estimate["slots_per_trial"]
    result(estimate["outline"])
    if not estimate["lengths"]:
        result("the length of the trials is not known in advance")
        return
    if unit is None:
        is_single = estimate["trials"] == 1
        who = "1 trial that decides" if is_single else f"{estimate['trials']} trials that decide"
        result(f"{who} how long to train")
        return
    rows = [(group["length"], group["trials"]) for group in estimate["lengths"]]
    print_table([f"ends after {unit}", "trials"], rows)
    total, max_length, trials = (
        estimate["total_length"],
        estimate["most_length"],
        estimate["trials"],
    )
    unit_name, article = {"batches": ("batch", "a"), "epochs": ("epoch", "an")}[unit]
    slots_text = "1 slot" if slots == 1 else f"{slots} slots"
    who = "1 trial trains" if trials == 1 else f"{trials} trials together train"
    result(f"{who} {total:,} {unit}, on {slots_text}{'' if trials == 1 else ' each'}")
    may_be_more = max_length > total
    if may_be_more:
        limit_text = f"If no trial is stopped early, they train {max_length:,} {unit}."
        result(textwrap.fill(f"{estimate['premise']} {limit_text}", _WIDTH))
    if estimate["slot_hours"] is None:
        bound = f", at most {max_length * slots:,}" if may_be_more else ""
        result(
            f"cost: {total * slots:,} {unit} on one slot{bound}\n"
            f"To get slot-hours, add --seconds-per-{unit_name} SECONDS, or --like with the id of a "
            "similar experiment."
        )
        return
    source = f", as in experiment {estimate['like']}" if estimate["like"] else ""
    seconds = estimate["seconds_per_unit"]
    bound = f", at most {estimate['most_slot_hours']:.3g}" if may_be_more else ""
    hours = f"{estimate['slot_hours']:.3g} slot-hours{bound}"
    result(f"cost: {hours}, at {seconds:.3g} s {article} {unit_name}{source}")
