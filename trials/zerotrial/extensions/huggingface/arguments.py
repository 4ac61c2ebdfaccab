"""``hyperparameters.training_arguments`` of an experiment, laid over a script's own."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from zerolab.contract.hparam_reads import note_read
from zerolab.contract.spec import RunSpec
from zerolab.errors import ConfigError
from zerolab.schema.section import suggest
from zerotrial.extensions.huggingface.run import experiment, refuse

__all__ = ["lay_over"]

_BLOCK = "hyperparameters.training_arguments"


def lay_over(arguments: Any) -> None:
    """Set the arguments configured by the experiment.

    Args:
        arguments: A ``TrainingArguments`` or subclass with its fields assigned.

    Raises:
        SystemExit: If names are unknown or values of the wrong kind; lists all of them.
    """
    spec = experiment()
    if spec is None:
        return
    try:
        for name, value in configured_arguments(spec, arguments).items():
            setattr(arguments, name, value)
    except ConfigError as error:
        refuse(spec, error)


def configured_arguments(spec: RunSpec, arguments: Any) -> dict[str, Any]:
    """Return the arguments set by the experiment, including the length of training.

    Raises:
        ConfigError: Lists all problems at once.
    """
    note_read("training_arguments")
    configured = spec.hparams.get("training_arguments", {})
    if not isinstance(configured, Mapping):
        problem = (
            f"{_BLOCK}: must be a mapping of TrainingArguments' names to values, got {configured!r}"
        )
        raise ConfigError("experiment", [problem])
    fields = {field.name for field in dataclasses.fields(arguments) if field.init}
    problems = [
        f"{_BLOCK}.{name}: {type(arguments).__name__} has no such argument{suggest(name, fields)}"
        for name in configured
        if name not in fields
    ]
    values: dict[str, Any] = {}
    for name in fields & configured.keys():
        now, value = getattr(arguments, name), configured[name]
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
    """Return the kind of value required to replace the current one."""
    if value is None or isinstance(now, str) or not isinstance(now, bool | int | float):
        return None  # enumerations and paths: TrainingArguments reports it
    if isinstance(now, bool):
        return None if isinstance(value, bool) else "true or false"
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if isinstance(now, int):
        return None if number and isinstance(value, int) else "a whole number"
    return None if number else "a number"


def _length(spec: RunSpec, values: Mapping[str, Any]) -> tuple[dict[str, Any], str | None]:
    """Return the length of training: one batch in test mode, else the searcher's or script's."""
    full = spec.fit.max_length if spec.fit is not None else None
    name = "num_train_epochs" if full and full.unit == "epochs" else "max_steps"
    if full is not None and (configured := values.get(name, full.count)) != full.count:
        problem = f"must be the searcher's length, {full.count} {full.unit}, or be left out"
        return {}, f"{_BLOCK}.{name}: {problem}, got {configured!r}"
    if spec.test_mode:
        return {"max_steps": 1}, None
    if full is None:
        return {}, None
    if full.unit == "batches":
        return {"max_steps": full.count}, None
    return {"max_steps": -1, "num_train_epochs": float(full.count)}, None
