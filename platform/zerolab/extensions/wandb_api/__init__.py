"""A subset of wandb on live runs and trials, and the replacement of the module ``wandb``.

``import zerolab.compat.wandb as wandb`` has these names. :func:`install` makes ``import wandb``
find them, in this process and its children: the folder ``modules`` is put on the search path.
"""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zerolab.extensions.wandb_api.artifact import Artifact
from zerolab.extensions.wandb_api.media_values import Audio, Histogram, Html, Image, Table
from zerolab.extensions.wandb_api.unsupported import advice
from zerolab.extensions.wandb_api.wandb_run import Run, Settings, init, print_line, print_once

__all__ = [
    "Artifact",
    "Audio",
    "Histogram",
    "Html",
    "Image",
    "Run",
    "Settings",
    "Table",
    "define_metric",
    "finish",
    "init",
    "install",
    "log",
    "log_artifact",
    "login",
    "require",
    "save",
    "setup",
    "termerror",
    "termlog",
    "termwarn",
    "unwatch",
    "watch",
]

__version__ = "0.31.0"
"""Version of wandb whose calls are replaced."""

MODULES = Path(__file__).parent / "modules"
"""Folder of the search path in which ``import wandb`` finds the replacement."""


def install() -> None:
    """Make ``import wandb`` find the replacement, in this process and its children."""
    folder = str(MODULES)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    known = os.environ.get("PYTHONPATH", "")
    if folder not in known.split(os.pathsep):
        os.environ["PYTHONPATH"] = os.pathsep.join([folder, known]) if known else folder


def log(data: Mapping[str, Any], step: int | None = None, commit: bool | None = None) -> None:  # noqa: FBT001 - as wandb
    """Report values; see :meth:`Run.log`.

    Args:
        data: Names to values.
        step: Number of the step.
        commit: Whether the step is complete.

    Raises:
        RuntimeError: If there is no run.
    """
    _run().log(data, step, commit)


def define_metric(name: str, *values: Any, **options: Any) -> None:
    """Use another metric as the step of a metric; see :meth:`Run.define_metric`.

    Args:
        name: Name of the metric.
        values: As there.
        options: As there.

    Raises:
        RuntimeError: If there is no run.
    """
    _run().define_metric(name, *values, **options)


def watch(*values: Any, **options: Any) -> None:
    """Print that gradients are not recorded.

    Args:
        values: Ignored.
        options: Ignored.

    Raises:
        RuntimeError: If there is no run.
    """
    _run().watch(*values, **options)


def unwatch(*values: Any) -> None:
    """Do nothing.

    Args:
        values: Ignored.
    """


def save(glob_str: str | Path, *values: Any, **options: Any) -> list[str]:
    """Report files; see :meth:`Run.save`.

    Args:
        glob_str: Path or pattern.
        values: As there.
        options: As there.

    Raises:
        RuntimeError: If there is no run.
    """
    return _run().save(glob_str, *values, **options)


def log_artifact(artifact_or_path: Any, *values: Any, **options: Any) -> Artifact:
    """Report the files of an artifact; see :meth:`Run.log_artifact`.

    Args:
        artifact_or_path: Artifact or path.
        values: As there.
        options: As there.

    Raises:
        RuntimeError: If there is no run.
    """
    return _run().log_artifact(artifact_or_path, *values, **options)


def finish(exit_code: int | None = None, **options: Any) -> None:
    """End the run of this process, if there is one.

    Args:
        exit_code: Exit code of the script; other than 0, the run fails.
        options: Ignored.
    """
    del options
    if Run.current is not None:
        Run.current.finish(exit_code)


def login(*values: Any, **options: Any) -> bool:
    """Do nothing: Zerolab uses its own token.

    Args:
        values: Ignored.
        options: Ignored.
    """
    del values, options
    print_once("login: not needed; reports use the token of Zerolab")
    return True


def setup(*values: Any, **options: Any) -> None:
    """Do nothing.

    Args:
        values: Ignored.
        options: Ignored.
    """


def require(*values: Any, **options: Any) -> None:
    """Do nothing.

    Args:
        values: Ignored.
        options: Ignored.
    """


def termlog(string: str = "", **options: Any) -> None:
    """Print a message.

    Args:
        string: The message.
        options: ``repeat=False`` prints it once.
    """
    (print_line if options.get("repeat", True) else print_once)(string)


termwarn = termerror = termlog


def _run() -> Run:
    if Run.current is None:
        msg = "there is no run; call wandb.init first"
        raise RuntimeError(msg)
    return Run.current


def __getattr__(name: str) -> Any:
    """Return the current run, or a part of it.

    Raises:
        ImportError: If wandb has the name and there is no counterpart.
        AttributeError: If the name is unknown.
    """
    if name == "run":
        return Run.current
    if name in {"config", "summary"}:
        return getattr(_run(), name)
    if message := advice(name):
        raise ImportError(message)
    raise AttributeError(f"module 'wandb' has no attribute {name!r}")
