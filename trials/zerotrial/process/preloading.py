"""What the ranks of a trial class need, imported once by the process that they are forked from."""

import gc
import importlib
import logging

__all__ = ["FOR_CLASSES", "import_next"]

logger = logging.getLogger(__name__)

FOR_CLASSES = (
    "zerotrial.process.harness",
    "zerotrial.loop.session",
    "zerotrial.engine.build",
    "zerolab.client.http",
    "zerolab.config.validation",
    "httpcore",  # httpx imports it with its first client
    "encodings.idna",  # the elastic agent asks for the name of this machine
    "torch.utils.data",
    "safetensors.torch",
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "torch._dynamo",  # optimizers import it with their first step
)
"""1.8 s of a CPU and 94 MB."""


def import_next(waiting: list[str]) -> None:
    """Import the first of some modules, and take it off the list."""
    name = waiting.pop(0)
    try:
        importlib.import_module(name)
    except ImportError:  # the run that needs it will say so, where the user sees it
        logger.exception("%s cannot be imported", name)
    if not waiting:
        # A launcher and a rank that look through all this for garbage write to it, and
        # so copy it: more than a third of the pages that a short trial copies.
        gc.freeze()
