"""Default server of a client."""

import os
from pathlib import Path

from zerolab.contract.spec import ENV_MASTER, ENV_RUN_SPEC, ENV_TOKEN, read_run_spec
from zerolab.errors import ConfigError
from zerolab.paths import Home, named_master, server_url, token_of

__all__ = ["find_server"]


def find_server() -> tuple[str, str]:
    """Return address and token of the server that this process belongs to.

    ``ZEROLAB_MASTER`` and ``ZEROLAB_TOKEN`` come first, then the run that the process is part of,
    then the server of the data directory (``ZEROLAB_HOME``, or ``~/.zerolab``).

    Raises:
        ConfigError: If no server is found.
    """
    home = Home.default()
    if named_master() is None and ENV_RUN_SPEC in os.environ:
        spec = read_run_spec(Path(os.environ[ENV_RUN_SPEC]))
        if spec.master:
            return spec.master, spec.token
    url = server_url(home)
    if url is None:
        problem = f"url: no server runs for the data directory {home.path}"
        remedy = f"start one with `zerolab up`, set {ENV_MASTER} and {ENV_TOKEN}, or give url"
        raise ConfigError("Client()", [f"{problem}; {remedy} and token"])
    return url, token_of(home)
