"""Option ``--autotuning`` of ``zerolab launch``: the script's engine file, tuned before it runs."""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace

import typer

from zerolab.errors import ConfigError
from zerolab.extensions.launcher_ssh.coordinator import LaunchPlan
from zerolab.extensions.launcher_ssh.options import LaunchOptions

__all__ = ["with_tuned_file"]

_OPTIONS = ("--deepspeed_config", "--deepspeed")
"""Arguments of scripts that name their engine file."""


def with_tuned_file(options: LaunchOptions, plan: LaunchPlan) -> LaunchOptions:
    """Tune the engine file that the script's arguments name, and put the tuned one in its place.

    Args:
        options: Options of the launch.
        plan: Their plan, on one machine.

    Raises:
        ConfigError: If no argument names a file, or the launch is not one that can be tuned.
        typer.Exit: If the tuning fails.
    """
    arguments = list(options.arguments)
    index, prefix = _position(arguments)
    problems = []
    if index is None:
        problems.append(
            "--autotuning: needs an argument of the script that names the engine file, such as "
            "--deepspeed_config ds_config.json; or use `zerolab autotune ds_config.json -- SCRIPT`"
        )
    if options.module or options.no_python:
        problems.append("--autotuning: needs a script, got --module or --no_python")
    if len(plan.places) != 1 or not plan.places[0].local:
        problems.append(
            f"--autotuning: tunes on this machine only, got {len(plan.places)} machine(s); tune on "
            "one, and launch on all with the tuned file"
        )
    if problems or index is None:
        raise ConfigError("zerolab launch", problems)
    command = [sys.executable, "-P", "-m", "zerolab", "autotune"]
    command += [arguments[index].removeprefix(prefix), "--json"]
    command += ["--ranks", str(len(plan.places[0].slots))]
    switches = {
        "--cpu": options.cpu,
        "--no_local_rank": options.no_local_rank,
        "--as-deepspeed": options.as_deepspeed,
    }
    command += [name for name, is_set in switches.items() if is_set]
    tuning = subprocess.run(
        [*command, "--", options.script, *arguments], stdout=subprocess.PIPE, check=False
    )
    if tuning.returncode:
        raise typer.Exit(tuning.returncode)
    arguments[index] = prefix + json.loads(tuning.stdout)["tuned_file"]
    return replace(options, arguments=arguments)


def _position(arguments: Sequence[str]) -> tuple[int | None, str]:
    """Return the index of the argument with the file's name, and its text before the name."""
    for index, word in enumerate(arguments):
        for option in _OPTIONS:
            if word.startswith(f"{option}="):
                return index, f"{option}="
            if word == option and index + 1 < len(arguments):
                following = arguments[index + 1]
                if not following.startswith("-"):
                    return index + 1, ""
    return None, ""
