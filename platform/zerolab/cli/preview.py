"""``zerolab experiment preview``: which trials there will be, and what they cost."""

import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zerolab.cli.connection import id_of
from zerolab.cli.output import AsJson, print_json, print_table, result, say_warnings

if TYPE_CHECKING:
    from zerolab.searcher.preview import Preview

__all__ = ["preview"]

_WIDTH = 100


def preview(
    config: Annotated[
        Path, typer.Argument(help="Experiment file, or the folder of an experiment.yaml.")
    ],
    seconds_per_batch: Annotated[
        float | None, typer.Option(help="How long one batch of a trial takes.")
    ] = None,
    seconds_per_epoch: Annotated[
        float | None, typer.Option(help="How long one epoch of a trial takes.")
    ] = None,
    like: Annotated[
        int | None,
        typer.Option(
            parser=id_of("experiment"),
            help="Id of an experiment whose trials took as long; asks the server.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say how many trials train how far, and what that costs; nothing is started.

    Without a time and --like it needs no server.

    Example: zerolab experiment preview experiment.yaml --seconds-per-batch 0.05
    """
    times = {"seconds_per_batch": seconds_per_batch, "seconds_per_epoch": seconds_per_epoch}
    given = {name: value for name, value in times.items() if value is not None}
    _check(given, like)
    from zerolab.config.files import experiment_file

    file = experiment_file(config)
    found = _asked(file, like) if like is not None else _computed(file, given)
    say_warnings(found)
    if as_json:
        print_json(found)
        return
    _show(found)


def _check(given: Mapping[str, float], like: int | None) -> None:
    from zerolab.errors import ConfigError

    options = {f"--{name.replace('_', '-')}": value for name, value in given.items()}
    problems = [
        f"{option}: must be above 0, got {value:g}"
        for option, value in options.items()
        if not 0 < value < float("inf")
    ]
    named = [*options, *(["--like"] if like is not None else [])]
    if len(named) > 1:
        problems.append(f"{named[0]}: must stand alone, got {' and '.join(named)}")
    if problems:
        raise ConfigError("zerolab experiment preview", problems)


def _computed(file: Path, given: Mapping[str, float]) -> dict[str, Any]:
    from zerolab.config import load_experiment
    from zerolab.config.experiment.search_preview import estimate_search

    seconds = given.get("seconds_per_batch"), given.get("seconds_per_epoch")
    config = load_experiment(file)
    return _plain(
        estimate_search(config, seconds_per_batch=seconds[0], seconds_per_epoch=seconds[1])
    )


def _asked(file: Path, like: int) -> dict[str, Any]:
    from zerolab.cli.connection import connect
    from zerolab.config import load_experiment
    from zerolab.config.files import read_yaml

    load_experiment(file)  # so that its mistakes are told with the file's name
    with connect() as client:
        return client.preview(read_yaml(file), like=like)


def _plain(found: "Preview") -> dict[str, Any]:
    """As the server answers it."""
    return {
        "outline": found.outline,
        "trials": found.trials,
        "unit": found.unit,
        "lengths": [
            {"length": length, "trials": number} for length, number in sorted(found.lengths.items())
        ],
        "total_length": found.total_length,
        "most_length": found.most_length,
        "slots_per_trial": found.slots,
        "seconds_per_unit": found.seconds_per_unit,
        "like": found.like,
        "slot_hours": found.slot_hours,
        "most_slot_hours": found.most_slot_hours,
        "premise": found.premise,
        "warnings": list(found.warnings),
    }


def _show(found: Mapping[str, Any]) -> None:
    unit, slots = found["unit"], found["slots_per_trial"]
    result(found["outline"])
    if not found["lengths"]:
        result("how far they train cannot be said beforehand")
        return
    if unit is None:
        alone = found["trials"] == 1
        who = "1 trial, which decides" if alone else f"{found['trials']} trials, which decide"
        result(f"{who} alone how far to train")
        return
    rows = [(each["length"], each["trials"]) for each in found["lengths"]]
    print_table([f"ends after {unit}", "trials"], rows)
    total, most, trials = found["total_length"], found["most_length"], found["trials"]
    one, article = {"batches": ("batch", "a"), "epochs": ("epoch", "an")}[unit]
    held = "1 slot" if slots == 1 else f"{slots} slots"
    who = "1 trial trains" if trials == 1 else f"{trials} trials together train"
    result(f"{who} {total:,} {unit}, on {held}{'' if trials == 1 else ' each'}")
    may_be_more = most > total
    if may_be_more:
        rest = f"at most they train {most:,} {unit}, if none is stopped early."
        result(textwrap.fill(f"That is {found['premise']}; {rest}", _WIDTH))
    if found["slot_hours"] is None:
        bound = f", at most {most * slots:,} times" if may_be_more else ""
        result(
            f"cost: {total * slots:,} times one {one} on one slot{bound}; for slot-hours give "
            f"--seconds-per-{one}, or --like ID of an experiment whose {unit} took as long"
        )
        return
    source = f", as in experiment {found['like']}" if found["like"] else ""
    seconds = found["seconds_per_unit"]
    bound = f", at most {found['most_slot_hours']:.3g}" if may_be_more else ""
    hours = f"{found['slot_hours']:.3g} slot-hours{bound}"
    result(f"cost: {hours}, at {seconds:.3g} s {article} {one}{source}")
