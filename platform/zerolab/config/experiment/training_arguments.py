"""``hyperparameters.training_arguments``, looked up in the source of transformers, not imported.

Only what is certain is refused: where scripts use other arguments than ``TrainingArguments``, or
transformers is not installed here, the trial checks the names at its start.
"""

import ast
import functools
import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from zerolab.config.experiment.model_source import ModelFiles
from zerolab.schema.section import suggest
from zerolab.syntax import parsed

__all__ = ["training_argument_problems"]

_CLASS = "TrainingArguments"


def training_argument_problems(space: Mapping[str, Any], model: ModelFiles) -> list[str]:
    """Name arguments that no ``TrainingArguments`` has, with what may have been meant.

    Args:
        space: An experiment's hyperparameters.
        model: The model directory.
    """
    given = space.get("training_arguments")
    if not isinstance(given, Mapping) or not given or not _uses_no_other(model):
        return []
    known = _installed_names()
    return [
        f"hyperparameters.training_arguments.{name}: {_CLASS} has no such argument"
        f"{suggest(name, known)}"
        for name in given
        if known and isinstance(name, str) and name not in known
    ]


def _uses_no_other(model: ModelFiles) -> bool:
    """Whether the scripts name ``TrainingArguments``, and nothing that may derive from it."""
    found: set[str] = set()
    for path in model.names():
        source = model.read(path) if path.endswith(".py") else None
        if source is None:
            continue
        tree = parsed(source)
        if tree is None:
            return False
        found.update(name for node in ast.walk(tree) for name in _names(node))
    return {name for name in found if name.endswith(_CLASS) or name == "trl"} == {_CLASS}


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
    """Fields of the installed class; none where transformers is not installed, or is unlike."""
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
