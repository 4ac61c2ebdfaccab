"""Stands in for a module named ``deepspeed``, so that scripts written for it run unchanged.

``install()`` makes ``import deepspeed`` find what :mod:`zerotrial.compat.deepspeed.names` has, on
top of this engine; Hugging Face's libraries then take DeepSpeed for installed. A script is run with
it by ``python -m zerotrial.compat.deepspeed script.py``, and Python processes that it starts
find it by the variable ``ZEROLAB_AS_DEEPSPEED``.
"""

import os
import sys

from zerolab.contract.spec import ENV_AS_DEEPSPEED
from zerolab.errors import ConfigError
from zerotrial.compat.deepspeed.finder import install

__all__ = ["install", "install_from_environment"]


def install_from_environment() -> None:
    """Do what the variable says, at the start of a Python process; nothing where it is not set.

    What ``accelerate launch`` says of FSDP names a stage then, as to ``zerolab launch``.

    What stands in the way ends the process with code 2: the script would use another deepspeed.
    """
    wanted = os.environ.get(ENV_AS_DEEPSPEED, "")
    if wanted in {"", "0"}:
        return
    try:
        _take_fsdp_for_the_engine()
        install(force=wanted == "force")
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        sys.stderr.flush()
        os._exit(2)  # an exception here would be printed and passed over


def _take_fsdp_for_the_engine() -> None:
    if os.environ.get("ACCELERATE_USE_FSDP") != "true":
        return
    from zerolab.launcher.accelerate import deepspeed_variables_of_fsdp

    variables = deepspeed_variables_of_fsdp(os.environ)
    os.environ.update(variables)
    if os.environ.get("RANK", "0") == "0":
        sys.stderr.write(
            f"{ENV_AS_DEEPSPEED}: the FSDP section of accelerate's file is taken for stage "
            f"{variables['ACCELERATE_DEEPSPEED_ZERO_STAGE']}; unset the variable for torch's FSDP\n"
        )
