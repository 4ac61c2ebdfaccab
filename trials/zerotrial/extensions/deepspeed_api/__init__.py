"""A replacement for the module ``deepspeed``, so that scripts written for it run unchanged.

``install()`` makes ``import deepspeed`` find :mod:`zerotrial.extensions.deepspeed_api.names`, built
on this engine. Hugging Face's libraries then consider DeepSpeed installed. ``python -m
zerotrial.extensions.deepspeed_api script.py`` runs a script with it; Python processes that the
script starts find it through the variable ``ZEROLAB_AS_DEEPSPEED``.
"""

import os
import sys

from zerolab.contract.spec import ENV_AS_DEEPSPEED
from zerolab.errors import ConfigError
from zerotrial.extensions.deepspeed_api.finder import install

__all__ = ["install", "install_from_environment"]


def install_from_environment() -> None:
    """Apply the variable at the start of a Python process; do nothing without it.

    Settings of ``accelerate launch`` for FSDP then choose a stage, as with ``zerolab launch``.

    A conflict ends the process with code 2: the script would use another deepspeed.
    """
    setting = os.environ.get(ENV_AS_DEEPSPEED, "")
    if setting in {"", "0"}:
        return
    try:
        _take_fsdp_for_the_engine()
        install(force=setting == "force")
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        sys.stderr.flush()
        os._exit(2)  # an exception here would be printed and passed over


def _take_fsdp_for_the_engine() -> None:
    if os.environ.get("ACCELERATE_USE_FSDP") != "true":
        return
    from zerolab.registry import PARTS

    variables = PARTS["fsdp_settings"].deepspeed_variables_of_fsdp(os.environ)
    os.environ.update(variables)
    if os.environ.get("RANK", "0") == "0":
        sys.stderr.write(
            f"{ENV_AS_DEEPSPEED}: the FSDP section of accelerate's file is read as stage "
            f"{variables['ACCELERATE_DEEPSPEED_ZERO_STAGE']}; unset the variable for torch's FSDP\n"
        )
