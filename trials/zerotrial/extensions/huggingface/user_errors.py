"""User errors that would end a script at every start.

As with trial classes (:mod:`zerotrial.failures`), errors raised while a trial is being built occur
at every start. A script is its own process. Functions that build parts of a Trainer or an
Accelerator therefore record the error they raise. If that error ends the script, the platform
does not restart it. A script that catches the error continues.
"""

import functools
import os
import sys
from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path
from types import TracebackType
from typing import Any

__all__ = ["as_users_mistake", "built_likewise", "note", "while_building", "while_choosing"]

_CONSTRUCTORS = {"__init__", "__post_init__"}

_REFUSED = 2
"""argparse's code."""

_NOTED: ContextVar[Exception | None] = ContextVar("noted", default=None)
"""The newest one."""


def while_building(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function whose result depends on user input only."""

    @functools.wraps(original)
    def noting(*args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        except Exception as error:
            note(error, building=True)
            raise

    return noting


def while_choosing(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap an evaluation that looks for the metric which the schedule is to follow."""

    @functools.wraps(original)
    def choosing(*args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        except KeyError as error:
            if "metric_for_best_model" in str(error):
                note(error, building=True)
            raise

    return choosing


def as_users_mistake(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap what ends a script by argparse's code: its command line is wrong at each start."""

    @functools.wraps(original)
    def refusing(*args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        except SystemExit as end:
            from zerolab.contract.spec import EXIT_USER_ERROR
            from zerotrial.extensions.huggingface.run import is_script

            if end.code != _REFUSED or not is_script():
                raise
            raise SystemExit(EXIT_USER_ERROR) from end

    return refusing


def built_likewise(kind: Any) -> None:
    """Have the constructors of all classes that are derived from ``kind`` later be wrapped so."""

    def init_subclass(derived: type, /, **options: Any) -> None:
        super(kind, derived).__init_subclass__(**options)
        for name in _CONSTRUCTORS & vars(derived).keys():
            setattr(derived, name, while_building(vars(derived)[name]))

    kind.__init_subclass__ = classmethod(init_subclass)


def note(error: Exception, *, building: bool) -> None:
    """Have the trial end for good if it is this error that ends the script of an experiment.

    Args:
        error: About to be raised on.
        building: Whether it came before the first batch.
    """
    from zerotrial.extensions.huggingface.run import experiment

    spec = experiment()
    if spec is None or _NOTED.get() is error:  # while it leaves an enclosing constructor
        return
    _NOTED.set(error)
    before = sys.excepthook

    def at_the_end(
        kind: type[BaseException], last: BaseException, trace: TracebackType | None
    ) -> None:
        from zerolab.contract.outcome import DELIBERATE_EXITS, write_reason
        from zerotrial.failures import exit_code_of, reason_of, with_causes

        code = exit_code_of(last, building=building)
        if code in DELIBERATE_EXITS and any(cause is error for cause in with_causes(last)):
            rank = int(os.environ.get("RANK", "0")) if spec.slots > 1 else None
            write_reason(spec.run_dir, code, reason_of(last, Path(spec.model_dir)), rank)
        before(kind, last, trace)

    sys.excepthook = at_the_end
