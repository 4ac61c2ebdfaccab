"""Command ``zerolab init``: write a small project that runs."""

from pathlib import Path
from typing import Annotated

import typer

from zerolab.cli.connection import complete_from
from zerolab.cli.output import AsJson, print_json, print_message, result

__all__ = ["TEMPLATES", "init"]

TEMPLATES = {
    "class": "a trial class: Zerolab runs the training loop (PyTorch)",
    "script": "a training loop of your own, with the Core API (PyTorch)",
    "huggingface": "a script with transformers' Trainer",
    "accelerate": "a training loop with Hugging Face Accelerate",
}
"""Templates with their descriptions; their files are in ``cli/templates``."""

_FOLDER = Path(__file__).parents[1] / "templates"
_SUFFIX = "-tpl"
"""End of the names of template files, which are not modules of this package."""


def init(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="Directory of the project.")
    ] = Path(),
    template: Annotated[
        str,
        typer.Option(
            "--template",
            "-t",
            metavar="NAME",
            help="class, script, huggingface or accelerate.",
            autocompletion=complete_from(*TEMPLATES),
        ),
    ] = "class",
    as_json: AsJson = False,
) -> None:
    """Create a small project that runs at once.

    The project trains in seconds on a CPU and downloads nothing. Existing files are never
    overwritten.

    Example: zerolab init my-project
    zerolab init my-project --template huggingface
    """
    from zerolab.errors import ConfigError

    if template not in TEMPLATES:
        lines = "".join(f"\n  {name}: {text}" for name, text in TEMPLATES.items())
        problem = f"--template: must be one of {', '.join(TEMPLATES)}, got {template!r}{lines}"
        raise ConfigError("init", [problem])
    files = {
        directory / file.name.removesuffix(_SUFFIX): file.read_text(encoding="utf-8")
        for file in sorted((_FOLDER / template).iterdir())
    }
    if directory.exists() and not directory.is_dir():
        raise ConfigError("init", [f"DIR: must be a directory, got the file {directory}"])
    existing = [str(file) for file in files if file.exists() or file.is_symlink()]
    if existing:
        names = ", ".join(existing)
        raise ConfigError("init", [f"DIR: {names} exists already; use another directory"])
    directory.mkdir(parents=True, exist_ok=True)
    shown = str(directory)
    for file, text in files.items():
        file.write_text(text.replace("PROJECT", shown), encoding="utf-8")
    if as_json:
        print_json({"directory": shown, "template": template, "files": [str(f) for f in files]})
        return
    for file in files:
        result(str(file))
    print_message(f"next: zerolab run {shown}")
