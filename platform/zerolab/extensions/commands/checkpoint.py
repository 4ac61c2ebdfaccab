"""Commands of ``zerolab checkpoint`` that delete checkpoints."""

from typing import TYPE_CHECKING, Annotated

import typer

from zerolab.cli.checkpoint import complete_uuid
from zerolab.cli.connection import ExperimentId, connect
from zerolab.cli.output import AsJson, Yes, print_json, print_message, print_table
from zerolab.formatting import size_text

if TYPE_CHECKING:
    from zerolab.client.http import Json

__all__ = ["delete", "gc"]

DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Show what would be deleted; delete nothing.")
]


def delete(
    uuids: Annotated[
        list[str],
        typer.Argument(
            help="UUIDs of the checkpoints, or their first 4 or more characters.",
            autocompletion=complete_uuid,
        ),
    ],
    glob: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN",
            help="Delete only files that match, such as 'model0/rank-*'. May be repeated.",
        ),
    ] = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Delete checkpoints, or some of their files.

    A checkpoint that a trial or a registered model needs is not deleted.

    Example: zerolab checkpoint delete 2f0c --dry-run
    """
    with connect() as client:
        if not (dry_run or yes):
            plan = client.remove_checkpoints(uuids, glob or (), dry_run=True)
            _ask(plan)
        _print_removal(client.remove_checkpoints(uuids, glob or (), dry_run=dry_run), as_json)


def gc(
    experiment_id: ExperimentId,
    save_experiment_best: Annotated[
        int | None, typer.Option(help="Keep the N best checkpoints of the experiment.")
    ] = None,
    save_trial_best: Annotated[
        int | None, typer.Option(help="Keep the N best checkpoints of each trial.")
    ] = None,
    save_trial_latest: Annotated[
        int | None, typer.Option(help="Keep the N newest checkpoints of each trial.")
    ] = None,
    dry_run: DryRun = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Change the retention of checkpoints, and delete the others.

    The experiment keeps this policy for later checkpoints.

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
    typer.confirm(f"Delete {size} of {count} checkpoint(s)?", abort=True, err=True)


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
    done = "would be deleted" if answer["dry_run"] else "deleted"
    print_message(f"{size_text(answer['size_bytes'])} of {len(rows)} checkpoint(s) {done}")
