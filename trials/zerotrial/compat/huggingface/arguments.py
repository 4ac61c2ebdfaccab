"""``hyperparameters.training_arguments`` of an experiment, laid over a script's own."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from zerolab.contract.hparam_reads import note_read
from zerolab.contract.spec import RunSpec
from zerolab.errors import ConfigError
from zerolab.schema.section import suggest
from zerotrial.compat.huggingface.run import experiment, refuse

__all__ = ["lay_over"]

_BLOCK = "hyperparameters.training_arguments"


def lay_over(arguments: Any) -> None:
    """Set what the experiment says.

    Args:
        arguments: A ``TrainingArguments``, or what derives from it, with its fields assigned.

    Raises:
        SystemExit: If a name is unknown or a value of the wrong kind, all of which are named.
    """
    spec = experiment()
    if spec is None:
        return
    try:
        for name, value in wanted(spec, arguments).items():
            setattr(arguments, name, value)
    except ConfigError as error:
        refuse(spec, error)


def wanted(spec: RunSpec, arguments: Any) -> dict[str, Any]:
    """What the experiment says of the arguments, the length of the training among it.

    Raises:
        ConfigError: Names all problems at once.
    """
    note_read("training_arguments")
    given = spec.hparams.get("training_arguments", {})
    if not isinstance(given, Mapping):
        problem = (
            f"{_BLOCK}: must be a mapping of TrainingArguments' names to values, got {given!r}"
        )
        raise ConfigError("experiment", [problem])
    known = {field.name for field in dataclasses.fields(arguments) if field.init}
    problems = [
        f"{_BLOCK}.{name}: {type(arguments).__name__} has no such argument{suggest(name, known)}"
        for name in given
        if name not in known
    ]
    values: dict[str, Any] = {}
    for name in known & given.keys():
        now, value = getattr(arguments, name), given[name]
        misfit = _misfit(now, value)
        if misfit:
            problems.append(f"{_BLOCK}.{name}: must be {misfit}, got {value!r}")
        values[name] = float(value) if isinstance(now, float) and type(value) is int else value
    length, contradiction = _length(spec, values)
    if contradiction:
        problems.append(contradiction)
    if problems:
        raise ConfigError("experiment", sorted(problems))
    return {**values, **length}


def _misfit(now: Any, value: Any) -> str | None:
    """Say what a value must be, by the kind of the one that it takes the place of."""
    if value is None or isinstance(now, str) or not isinstance(now, bool | int | float):
        return None  # enumerations and paths: TrainingArguments says it by itself
    if isinstance(now, bool):
        return None if isinstance(value, bool) else "true or false"
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if isinstance(now, int):
        return None if number and isinstance(value, int) else "a whole number"
    return None if number else "a number"


def _length(spec: RunSpec, values: Mapping[str, Any]) -> tuple[dict[str, Any], str | None]:
    """How far to train: one batch in test mode, else as the searcher or the script itself says."""
    full = spec.fit.max_length if spec.fit is not None else None
    name = "num_train_epochs" if full and full.unit == "epochs" else "max_steps"
    if full is not None and (said := values.get(name, full.count)) != full.count:
        told = f"must be the searcher's length, {full.count} {full.unit}, or be left out"
        return {}, f"{_BLOCK}.{name}: {told}, got {said!r}"
    if spec.test_mode:
        return {"max_steps": 1}, None
    if full is None:
        return {}, None
    if full.unit == "batches":
        return {"max_steps": full.count}, None
    return {"max_steps": -1, "num_train_epochs": float(full.count)}, None
