"""Entry point of ``python -m zeroserver``; see :mod:`zeroserver.process`."""

import gc
import os
import signal
import sys
from types import ModuleType
from typing import Any

__all__ = ["start"]


def start() -> int:
    """Run a server; return the exit code.

    Garbage collection is disabled during imports, since modules stay in memory. This saves an
    eighth of the startup time. ``freeze_startup_objects`` enables it again.
    """
    gc.disable()
    # FastAPI checks whether each parameter is a pydantic 1 model, and would import pydantic.v1 for
    # that: a fifteenth of the startup time, and memory. Since 0.129 it accepts a missing module.
    sys.modules["pydantic.v1"] = None  # type: ignore[assignment]
    # uvicorn's package imports its unused command line with click: a thirtieth of the startup time.
    command_line = ModuleType("uvicorn.main")
    command_line.__dict__["__getattr__"] = lambda _name: None
    sys.modules["uvicorn.main"] = command_line
    # pydantic would read the metadata of all distributions to find plugins.
    os.environ["PYDANTIC_DISABLE_PLUGINS"] = "__all__"
    _defer_models()
    from zeroserver.process import main

    return main()


def _defer_models() -> None:
    """Make models build their validators on first use.

    FastAPI declares 40 models for the OpenAPI document and builds three of them during its import.
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
