"""Command ``zerolab import``."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from zerolab.cli.connection import InProject, complete_from
from zerolab.cli.groups import in_panel
from zerolab.cli.output import AsJson, print_json, print_message, result
from zerolab.errors import ConfigError, NotFoundError

if TYPE_CHECKING:
    from zerolab.client.http import Client
    from zerolab.client.imports import ImportedRun

__all__ = ["import_runs"]

_NAMES = ("tensorboard", "wandb", "mlflow", "neptune", "determined", "metrics")
"""Names of the built-in sources."""


@in_panel("Results")
def import_runs(
    path: Annotated[
        Path, typer.Argument(help="File or directory with runs; directories are searched.")
    ],
    source: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="SOURCE",
            help="Import only runs of this source: tensorboard, wandb, mlflow, neptune, "
            "determined or metrics.",
            autocompletion=complete_from(*_NAMES),
        ),
    ] = None,
    project: InProject = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be imported; change nothing.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Import runs of other trackers, and print their ids.

    Each run becomes an experiment with its metrics, steps, times, hyperparameters and tags. A run
    that was imported before is skipped. Sources are event directories of TensorBoard, offline runs
    of wandb, MLflow stores (directories and SQLite files), Parquet files of neptune-exporter, dumps
    of Determined's database, and metrics.jsonl files.

    Example: zerolab import .zerolab/runs/train/metrics.jsonl
    zerolab import mlruns --dry-run
    """
    from zerolab.cli.connection import connect
    from zerolab.client.objects.progress_bar import Progress, show_progress

    locations = _locate(path, source)
    reports = []
    with connect() as client, show_progress("import", shown=len(locations) > 1) as show:
        known = _imported_keys(client)
        for number, run in enumerate(_read(locations, path)):
            show(Progress(number / len(locations), run.name, has_ended=False))
            existing = known.get(run.key)
            if existing is None and not dry_run:
                known[run.key] = client.import_metrics(run.content(), project).id
            if not dry_run:  # again for a known run: its import may have been interrupted
                _send_media(client, known[run.key], run)
            reports.append(_report(run, known.get(run.key), is_new=existing is None))
        show(Progress(1.0, f"{len(reports)} runs", has_ended=True))
    if as_json:
        print_json(reports)
        return
    for report in reports:
        print_message(_line(report, dry_run=dry_run))
        if report["left_out"]:
            items = (f"{count:,} {kind}" for kind, count in sorted(report["left_out"].items()))
            print_message(f"  left out: {', '.join(items)}")
        if report["experiment_id"] is not None:
            result(str(report["experiment_id"]))


def _locate(path: Path, source: str | None) -> list[tuple[Any, Any]]:
    """Return the source and the location of each run.

    Raises:
        ConfigError: If there are no runs, or runs of several sources.
    """
    from zerolab.client.imports import SOURCES

    if source is not None and source not in SOURCES:
        problem = f"--from: must be one of {', '.join(sorted(SOURCES))}, got {source!r}"
        raise ConfigError("zerolab import", [problem])
    if not path.exists():
        problem = (
            "must be the metrics.jsonl of a run, or a directory with runs (No such file or "
            "directory); scripts without a server write it to .zerolab/runs/"
        )
        raise ConfigError(str(path), [problem])
    names = sorted(SOURCES) if source is None else [source]
    runs_by_source = {name: runs for name in names if (runs := SOURCES[name].locate(path))}
    if not runs_by_source:
        problem = f"{path}: must contain runs of {', '.join(names)}; found none"
        raise ConfigError("zerolab import", [problem])
    if len(runs_by_source) > 1:
        counts = ", ".join(f"{len(runs)} of {name}" for name, runs in runs_by_source.items())
        problem = f"{path}: must contain runs of one source, got {counts}; choose one with --from"
        raise ConfigError("zerolab import", [problem])
    return [(SOURCES[name], location) for name, runs in runs_by_source.items() for location in runs]


def _read(locations: list[tuple[Any, Any]], root: Path) -> Iterator["ImportedRun"]:
    for source, location in locations:
        yield source.read(location, root)


def _send_media(client: "Client", experiment_id: int, run: "ImportedRun") -> None:
    for digest, content in run.contents.items():
        data = content.read_bytes() if isinstance(content, Path) else content
        with suppress(NotFoundError):  # imported by a version without media, or deleted since
            client.import_medium(experiment_id, digest, data)


def _imported_keys(client: "Client") -> dict[str, int]:
    """Return the experiments of runs that were imported before, by the keys of the runs."""
    experiments = client.experiments()
    imported = ((item["config"].get("imported"), item["id"]) for item in experiments)
    return {block["key"]: number for block, number in imported if isinstance(block, dict)}


def _report(run: "ImportedRun", experiment_id: int | None, *, is_new: bool) -> dict[str, Any]:
    return {
        "name": run.name,
        "source": run.source,
        "experiment_id": experiment_id,
        "new": is_new,
        "points": run.points,
        "media": len(run.media) or len(run.contents),
        "metrics": run.names,
        "hparams": run.hparams,
        "labels": run.labels,
        "left_out": dict(run.omitted),
    }


def _line(report: dict[str, Any], *, dry_run: bool) -> str:
    end = "would be imported" if dry_run else f"imported as experiment {report['experiment_id']}"
    if not report["new"]:
        end = f"already imported as experiment {report['experiment_id']}"
    count = len(report["hparams"])
    media = f"{report['media']:,} media, " if report["media"] else ""
    points = f"{report['points']:,} points"
    return f"{report['name']}: {points}, {media}{count} hyperparameters, {end}"
