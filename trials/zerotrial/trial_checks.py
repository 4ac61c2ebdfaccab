"""Checks of a trial class before it is built: missing, misspelled and wrongly declared methods."""

import inspect
import logging

from zerolab.errors import TrialError
from zerolab.schema.section import closest
from zerotrial.trial import ZeroTrial

__all__ = ["check_trial_class"]

logger = logging.getLogger(__name__)

_PARAMETERS = {
    "__init__": ("context",),
    "train_batch": ("dataloader_iter", "epoch_idx", "batch_idx"),
    "evaluate_batch": ("dataloader_iter",),
    "evaluate_full_dataset": ("data_loader",),
    "build_training_data_loader": (),
    "build_validation_data_loader": (),
    "build_callbacks": (),
    "evaluation_reducer": (),
    "get_batch_length": ("batch",),
    "save": ("context", "path"),
    "load": ("context", "path"),
}
"""Arguments that the loop passes to each method, by position."""

_OPTIONAL = (
    "build_callbacks", "evaluation_reducer", "evaluate_batch", "evaluate_full_dataset",
    "get_batch_length",
)  # fmt: skip


def check_trial_class(trial_class: type[ZeroTrial]) -> None:
    """Check the methods of a trial class; warn about names that look misspelled.

    Raises:
        TrialError: If it lacks a method, or declares one that the loop cannot call.
    """
    name = trial_class.__name__
    abstract: frozenset[str] = getattr(trial_class, "__abstractmethods__", frozenset())
    missing = sorted(abstract)
    if not {"evaluate_batch", "evaluate_full_dataset"} & _overridden(trial_class):
        missing.append("evaluate_batch")
    problems = [f"{name}: must define {method}{_rename(trial_class, method)}" for method in missing]
    problems += [
        f"{name}.{method}: must be {method}({', '.join(('self', *parameters))}), got {declared}"
        for method, parameters in _PARAMETERS.items()
        if (declared := _wrong_signature(trial_class, method, len(parameters)))
    ]
    if problems:
        raise TrialError("\n".join(problems))
    for method in sorted(_own_methods(trial_class)):
        suggestion = closest(method, _OPTIONAL, cutoff=0.85)
        if suggestion is not None and suggestion not in _overridden(trial_class):
            logger.warning("%s.%s is never called; did you mean %r?", name, method, suggestion)


def _overridden(trial_class: type[ZeroTrial]) -> set[str]:
    return {
        method
        for method in _PARAMETERS
        if getattr(trial_class, method) is not getattr(ZeroTrial, method)
    }


def _own_methods(trial_class: type[ZeroTrial]) -> set[str]:
    """Return the public methods that the base class does not have."""
    names = set(dir(trial_class)) - set(dir(ZeroTrial))
    return {
        name
        for name in names
        if not name.startswith("_") and callable(inspect.getattr_static(trial_class, name))
    }


def _rename(trial_class: type[ZeroTrial], method: str) -> str:
    close = closest(method, _own_methods(trial_class), cutoff=0.75)
    return f"; rename {close!r} to {method!r}" if close else ""


def _wrong_signature(trial_class: type[ZeroTrial], method: str, arguments: int) -> str:
    """Return the declaration of a method that takes fewer arguments; "" if it can."""
    declared = inspect.getattr_static(trial_class, method)
    if not inspect.isfunction(declared):  # a static method, a wrapper: they know what they do
        return ""
    try:
        signature = inspect.signature(declared)
    except (TypeError, ValueError):
        return ""
    for count in (arguments, arguments + 1) if method == "evaluate_batch" else (arguments,):
        try:
            signature.bind(*[None] * (1 + count))
        except TypeError:
            continue
        return ""
    parameters = ", ".join(map(str, signature.parameters.values()))
    return f"{method}({parameters})"
