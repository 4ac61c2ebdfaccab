"""Old import path of `zerotrial.extensions.deepspeed_api`."""

from zerotrial.extensions.deepspeed_api import __path__ as __path__
from zerotrial.extensions.deepspeed_api import install, install_from_environment

__all__ = ["install", "install_from_environment"]
