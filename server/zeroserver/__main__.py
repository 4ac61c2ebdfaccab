"""``python -m zeroserver``: see :mod:`zeroserver.process`."""

import gc
import signal
import sys
from types import ModuleType
from typing import Any

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
    # uvicorn's package imports its command line, with click: a thirtieth of a start, unused.
    command_line = ModuleType("uvicorn.main")
    command_line.__dict__["__getattr__"] = lambda _name: None
    sys.modules["uvicorn.main"] = command_line
    _defer_models()
    from zeroserver.process import main

    return main()


def _defer_models() -> None:
    """Let models build their validators at first use.

    FastAPI declares 40 for the OpenAPI document and builds three of them when it is imported.
    """
    from pydantic import BaseModel

    def rebuild(model: type[BaseModel], /, **options: Any) -> bool | None:
        return original.__func__(model, **options) if options else None

    BaseModel.model_config["defer_build"] = True
    original = BaseModel.__dict__["model_rebuild"]
    BaseModel.model_rebuild = classmethod(rebuild)  # type: ignore[method-assign, assignment]
    try:
        import fastapi.openapi.models  # noqa: F401 - without building models; pydantic passes options at first use
    finally:
        BaseModel.model_rebuild = original  # type: ignore[method-assign]


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    sys.exit(start())
