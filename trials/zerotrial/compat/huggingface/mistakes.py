"""What would end a script at each start, and is the user's to mend.

The rule is that of trial classes (:mod:`zerotrial.failures`): what fails while a trial is
being built fails each time. A script is its own process, so whatever builds a part of a Trainer or
an Accelerator notes the error that comes out of it, and if that error then ends the script, the
platform is told not to start it again. A script that catches it goes on.
"""

import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

__all__ = ["note", "while_building"]


def while_building(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function that decides by nothing but what the user wrote."""

    @functools.wraps(original)
    def noting(*args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        except Exception as error:
            note(error, building=True)
            raise

    return noting


def note(error: Exception, *, building: bool) -> None:
    """Have the trial end for good if it is this error that ends the script of an experiment.

    Args:
        error: About to be raised on.
        building: Whether it came before the first batch.
    """
    from zerotrial.compat.huggingface.run import experiment

    spec = experiment()
    if spec is None:
        return
    before = sys.excepthook

    def at_the_end(
        kind: type[BaseException], last: BaseException, trace: TracebackType | None
    ) -> None:
        from zerolab.contract.outcome import DELIBERATE, write_reason
        from zerotrial.failures import exit_code_of, reason_of, with_causes

        code = exit_code_of(last, building=building)
        if code in DELIBERATE and any(one is error for one in with_causes(last)):
            rank = int(os.environ.get("RANK", "0")) if spec.slots > 1 else None
            write_reason(spec.run_dir, code, reason_of(last, Path(spec.model_dir)), rank)
        before(kind, last, trace)

    sys.excepthook = at_the_end
