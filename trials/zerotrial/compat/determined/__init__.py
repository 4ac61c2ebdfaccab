"""Import path of the replacement for the package ``determined``."""

from zerotrial.extensions.determined_api import DIRECTORY, install

__all__ = ["DIRECTORY", "install"]
