"""Preloading of modules in the process that the ranks of a trial class are forked from."""

import gc
import importlib
import logging

__all__ = ["TRIAL_CLASS_MODULES", "import_next"]

logger = logging.getLogger(__name__)

TRIAL_CLASS_MODULES = (
    "zerotrial.process.harness",
    "zerotrial.loop.session",
    "zerotrial.engine.builder.build",
    "zerolab.client.http",
    "zerolab.config.validation",
    "httpcore",  # httpx imports it with its first client
    "encodings.idna",  # the elastic agent resolves the name of this machine
    "torch.utils.data",
    "safetensors.torch",
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "torch._dynamo",  # optimizers import it with their first step
)
"""Modules that a trial class imports: 1.8 s of CPU time and 94 MB."""


def import_next(pending: list[str]) -> None:
    """Import the first module of a list and remove it from there."""
    name = pending.pop(0)
    try:
        importlib.import_module(name)
    except ImportError:  # the run that needs it reports the error to its user
        logger.exception("%s cannot be imported", name)
    if not pending:
        # A garbage collection in a forked launcher or rank writes to these objects and so copies
        # their pages: more than a third of the pages that a short trial copies.
        gc.freeze()
