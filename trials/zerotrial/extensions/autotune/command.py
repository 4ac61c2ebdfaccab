"""Command ``zerolab autotune``."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from zerolab.cli.groups import single_command
from zerolab.cli.output import AsJson, print_fields, print_json, print_message

if TYPE_CHECKING:
    from zerotrial.extensions.autotune.settings import Settings
    from zerotrial.extensions.autotune.subjects import Subject
    from zerotrial.extensions.autotune.tuning import Tuning

__all__ = ["app"]

app = single_command()


@app.command(rich_help_panel="Train")
def autotune(  # noqa: PLR0917 - options of a command
    file: Annotated[
        Path,
        typer.Argument(
            help="Experiment file or its folder, or an engine file (JSON) with a script after --."
        ),
    ],
    script: Annotated[
        list[str] | None,
        typer.Argument(help="Script and its arguments.", metavar="[-- SCRIPT [ARGS]...]"),
    ] = None,
    metric: Annotated[
        str | None, typer.Option(help="throughput (default), latency or memory.", metavar="NAME")
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option(min=1, help="Ranks. Default: slots_per_trial; for a script all slots."),
    ] = None,
    cpu: Annotated[  # noqa: FBT002 - an option
        bool, typer.Option("--cpu", help="Use CPU slots even if there are GPUs.")
    ] = False,
    memory: Annotated[
        float | None,
        typer.Option(
            min=0.001, metavar="GB", help="Memory that a rank may use. Default: what is available."
        ),
    ] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Measured steps in the last rung. Default: 20.")
    ] = None,
    max_candidates: Annotated[
        int | None, typer.Option(min=1, help="Maximum number of candidates to run. Default: 50.")
    ] = None,
    timeout: Annotated[
        float | None,
        typer.Option(min=1, metavar="SECONDS", help="Maximum duration of a run. Default: 600."),
    ] = None,
    results_dir: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Directory of the results. Default: autotuning_results."),
    ] = None,
    restart: Annotated[  # noqa: FBT002 - an option
        bool, typer.Option("--restart", help="Delete earlier results instead of continuing them.")
    ] = False,
    no_local_rank: Annotated[  # noqa: FBT002 - an option
        bool,
        typer.Option("--no_local_rank", help="Do not pass --local_rank=N to the script."),
    ] = False,
    as_deepspeed: Annotated[  # noqa: FBT002 - an option
        bool,
        typer.Option(
            "--as-deepspeed", help="Let `import deepspeed` import Zerolab's engine in the script."
        ),
    ] = False,
    as_json: AsJson = False,  # noqa: FBT002 - an option
) -> None:
    """Find the engine settings that train fastest on this machine.

    Measures micro-batch, ZeRO stage, offload, activation checkpointing and bucket sizes in short
    runs, and keeps the global batch. Writes ds_config_optimal.json and a table of all candidates.
    A command that was stopped continues.

    Example: zerolab autotune experiment.yaml
    zerolab autotune ds_config.json --ranks 2 -- train.py --deepspeed_config ds_config.json
    """
    from zerolab.launcher.devices import find_slots
    from zerotrial.extensions.autotune.tuning import tune

    options: dict[str, object] = {
        "metric": metric,
        "memory_bytes": None if memory is None else int(1e9 * memory),
        "steps": steps,
        "max_candidates": max_candidates,
        "timeout_s": timeout,
        "results_dir": results_dir,
        "restart": restart or None,
    }
    subject, settings, notes = _read(file, script or [], options, local_rank=not no_local_rank)
    for note in notes:
        print_message(f"{subject.source}: without effect: {note}")
    slots = find_slots(ranks or subject.ranks, cpu=cpu)
    tuning = tune(subject, slots, settings, as_deepspeed=as_deepspeed, report=print_message)
    _print(tuning, as_json=as_json)


def _read(
    file: Path, script: list[str], options: dict[str, object], *, local_rank: bool
) -> "tuple[Subject, Settings, list[str]]":
    """Read the file and its ``autotuning`` block, which options override."""
    from dataclasses import replace

    from zerolab.config.files import experiment_file
    from zerolab.errors import ConfigError
    from zerotrial.extensions.autotune.settings import Settings, read_block
    from zerotrial.extensions.autotune.subjects import ExperimentSubject, ScriptSubject

    subject: Subject
    if file.is_dir() or file.suffix in {".yaml", ".yml"}:
        subject = ExperimentSubject(experiment_file(file))
        if script:
            problem = f"script: must be left out with an experiment, got {script[0]}"
            raise ConfigError(str(file), [problem])
    else:
        subject = script_subject = ScriptSubject(file, script, local_rank)
    metric = options["metric"]
    if metric not in {None, "throughput", "latency", "memory"}:
        problem = f"--metric: must be throughput, latency or memory, got {metric!r}"
        raise ConfigError("autotune", [problem])
    settings, notes = read_block(subject.content, subject.source, Settings())
    if isinstance(subject, ScriptSubject):
        script_subject.mappings = settings.mappings
    changes = {name: value for name, value in options.items() if value is not None}
    return subject, replace(settings, **changes), notes  # type: ignore[arg-type]


def _print(tuning: "Tuning", *, as_json: bool) -> None:
    from zerolab.formatting import duration_text, size_text

    best = tuning.best
    if as_json:
        print_json(
            {
                "overrides": best.candidate.overrides(tuning.profile.data_ranks),
                "samples_per_second": tuning.samples_per_second,
                "step_seconds": best.step_s,
                "memory_bytes": best.memory,
                "runs": tuning.runs,
                "run_seconds": tuning.wall_s,
                "cpu_seconds": tuning.cpu_s,
                "tuned_file": str(tuning.tuned_file),
                "table": str(tuning.table_file),
            }
        )
        return
    counts: dict[str, int] = {}
    for entry in tuning.entries:
        counts[entry.status] = counts.get(entry.status, 0) + 1
    print_fields(
        {
            "best": str(best.candidate),
            "throughput": f"{tuning.samples_per_second:.4g} samples/s, noise {best.noise:.0%}",
            "memory": f"{size_text(best.memory)} on a rank",
            "candidates": ", ".join(f"{count} {status}" for status, count in counts.items()),
            "cost": f"{tuning.runs} runs, {duration_text(tuning.wall_s)}",
            "tuned file": str(tuning.tuned_file),
            "table": str(tuning.table_file),
        }
    )
    print_message(f"to train with it, use {tuning.tuned_file} in place of the engine file")
