"""Call of a submitted function in a run: ``python -m zerolab.core.function MODULE NAME``."""

import importlib
import os
import sys
from pathlib import Path

from zerolab.contract.hparam_reads import note_read
from zerolab.contract.spec import ENV_RUN_SPEC, read_run_spec

__all__ = ["call"]

importing: str | None = None
"""Name of the module while it is imported; the client then refuses to submit its functions."""


def call(module_name: str, name: str) -> None:
    """Call a function of the model directory with the hyperparameters of this run.

    **Collective** if the function is: each rank calls it.

    Args:
        module_name: Module of the function.
        name: Name of the function.
    """
    global importing
    hparams = read_run_spec(Path(os.environ[ENV_RUN_SPEC])).hparams
    importing = module_name
    function = getattr(importlib.import_module(module_name), name)
    importing = None
    for hparam in hparams:
        note_read(hparam)
    function(**hparams)


if __name__ == "__main__":
    call(*sys.argv[1:])
