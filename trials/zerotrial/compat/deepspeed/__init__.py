"""Stands in for a module named ``deepspeed``, so that scripts written for it run unchanged.

``install()`` makes ``import deepspeed`` find what :mod:`zerotrial.compat.deepspeed.names` has, on
top of this engine; Hugging Face's libraries then take DeepSpeed for installed. A script is run with
it by ``python -m zerotrial.compat.deepspeed script.py``, and Python processes that it starts
find it by the variable ``ZEROLAB_AS_DEEPSPEED``.
"""

import os

from zerotrial.compat.deepspeed.finder import VARIABLE, install

__all__ = ["VARIABLE", "install", "install_from_environment"]


def install_from_environment() -> None:
    """Do what the variable says, at the start of a Python process; nothing where it is not set."""
    wanted = os.environ.get(VARIABLE, "")
    if wanted not in {"", "0"}:
        install(force=wanted == "force")
