"""Check of ``hyperparameters.training_arguments`` against the source of transformers.

Only certain errors are reported. If scripts use other arguments than ``TrainingArguments``, or
transformers is not installed here, the trial checks the names at its start.
"""

import ast
import functools
import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from zerolab.config.experiment.model_files import ModelFiles
from zerolab.extensions.config_checks.syntax import parsed
from zerolab.schema.section import suggest

__all__ = ["training_argument_problems"]

_CLASS = "TrainingArguments"


def training_argument_problems(space: Mapping[str, Any], model: ModelFiles) -> list[str]:
    """Report unknown fields of ``TrainingArguments``, with suggestions.

    Args:
        space: An experiment's hyperparameters.
        model: The model directory.
    """
    arguments = space.get("training_arguments")
    if not isinstance(arguments, Mapping) or not arguments or not _uses_no_other(model):
        return []
    fields = _installed_names()
    return [
        f"hyperparameters.training_arguments.{name}: {_CLASS} has no such argument"
        f"{suggest(name, fields)}"
        for name in arguments
        if fields and isinstance(name, str) and name not in fields
    ]


def _uses_no_other(model: ModelFiles) -> bool:
    """Return whether the scripts use ``TrainingArguments`` and no class derived from it."""
    names: set[str] = set()
    for path in model.names():
        source = model.read(path) if path.endswith(".py") else None
        if source is None:
            continue
        tree = parsed(source)
        if tree is None:
            return False
        names.update(name for node in ast.walk(tree) for name in _names(node))
    return {name for name in names if name.endswith(_CLASS) or name == "trl"} == {_CLASS}


def _names(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Name):
        yield node.id
    elif isinstance(node, ast.Attribute):
        yield node.attr
    elif isinstance(node, ast.alias):
        yield from (node.name.partition(".")[0], node.name)
    elif isinstance(node, ast.ImportFrom):
        yield (node.module or "").partition(".")[0]
    elif isinstance(node, ast.ClassDef):
        for base in node.bases:
            yield from (f"{node.name} derives from {name}" for name in _names(base))


@functools.cache
def _installed_names() -> frozenset[str]:
    """Fields of the installed class; empty if transformers is missing or has another layout."""
    try:
        spec = importlib.util.find_spec("transformers")
    except (ImportError, ValueError, AttributeError):
        return frozenset()
    if spec is None or spec.origin is None:
        return frozenset()
    try:
        tree = parsed((Path(spec.origin).parent / "training_args.py").read_bytes())
    except OSError:
        return frozenset()
    if tree is None:
        return frozenset()
    return frozenset(
        field.target.id
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name == _CLASS and not node.bases
        for field in node.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    )
