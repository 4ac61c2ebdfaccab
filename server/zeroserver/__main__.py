"""``python -m zeroserver``: see :mod:`zeroserver.process`."""

import gc
import signal
import sys

__all__ = ["start"]


def start() -> int:
    """Run a server; return the exit code.

    Modules stay in memory, so garbage collection is off while they are loaded, which saves an
    eighth of the start. ``freeze_startup_objects`` enables it again.
    """
    gc.disable()
    # FastAPI asks of each parameter whether it is a model of pydantic 1, and would load all of that
    # for a no: a fifteenth of a start, and memory for good. Since 0.129 it takes that for a no.
    sys.modules["pydantic.v1"] = None  # type: ignore[assignment]
    from pydantic import BaseModel

    # Models build their validators at first use. FastAPI declares 40 for the OpenAPI document.
    BaseModel.model_config["defer_build"] = True
    from zeroserver.process import main

    return main()


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    sys.exit(start())
