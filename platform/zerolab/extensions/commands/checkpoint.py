"""Commands of ``zerolab checkpoint`` that remove checkpoints."""

from typing import TYPE_CHECKING, Annotated

import typer

from zerolab.cli.connection import ExperimentId, connect
from zerolab.cli.output import AsJson, Yes, print_json, print_message, print_table
from zerolab.formatting import size_text

if TYPE_CHECKING:
    from zerolab.client.http import Json

__all__ = ["delete", "gc"]

DryRun = Annotated[bool, typer.Option("--dry-run", help="Only list what would be removed.")]


def delete(
    uuids: Annotated[
        list[str], typer.Argument(help="Uuids of the checkpoints, or their first characters.")
    ],
    glob: Annotated[
        list[str] | None, typer.Option(help="Only files like this; may be repeated.")
    ] = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Remove checkpoints, or some of their files; checkpoints in use are refused.

    Example: zerolab checkpoint delete 2f0c... --glob 'model0/rank-*'
    """
    with connect() as client:
        if not (dry_run or yes):
            plan = client.remove_checkpoints(uuids, glob or (), dry_run=True)
            _ask(plan)
        _print_removal(client.remove_checkpoints(uuids, glob or (), dry_run=dry_run), as_json)


def gc(
    experiment_id: ExperimentId,
    save_experiment_best: Annotated[
        int | None, typer.Option(help="Number of the experiment's best to keep.")
    ] = None,
    save_trial_best: Annotated[
        int | None, typer.Option(help="Number of each trial's best to keep.")
    ] = None,
    save_trial_latest: Annotated[
        int | None, typer.Option(help="Number of each trial's newest to keep.")
    ] = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Set an experiment's retention of checkpoints, and remove the others.

    Example: zerolab checkpoint gc 1 --save-trial-best 0 --dry-run
    """
    limits = {
        "save_experiment_best": save_experiment_best,
        "save_trial_best": save_trial_best,
        "save_trial_latest": save_trial_latest,
    }
    policy = {name: count for name, count in limits.items() if count is not None}
    with connect() as client:
        if not (dry_run or yes):
            plan = client.collect_checkpoints(experiment_id, policy, dry_run=True)
            _ask(plan)
        answer = client.collect_checkpoints(experiment_id, policy, dry_run=dry_run)
    _print_removal(answer, as_json)


def _ask(plan: "Json") -> None:
    """Ask whether to remove the checkpoints of a dry run.

    Raises:
        typer.Abort: If the user declines.
    """
    size, count = size_text(plan["size_bytes"]), len(plan["checkpoints"])
    typer.confirm(f"Remove {size} of {count} checkpoint(s)?", abort=True, err=True)


def _print_removal(answer: "Json", as_json: bool) -> None:
    """Print the removed checkpoints, or those of a dry run."""
    if as_json:
        print_json(answer)
        return
    rows = [
        (
            checkpoint["uuid"],
            checkpoint["trial_id"],
            checkpoint["steps_completed"],
            "all" if checkpoint["whole"] else len(checkpoint["files"]),
            size_text(checkpoint["size_bytes"]),
        )
        for checkpoint in answer["checkpoints"]
    ]
    if rows:
        print_table(["uuid", "trial", "batch", "files", "size"], rows)
    done = "would be removed" if answer["dry_run"] else "removed"
    print_message(f"{size_text(answer['size_bytes'])} of {len(rows)} checkpoint(s) {done}")
