"""Old import path of `zerotrial.extensions.huggingface`."""

from zerotrial.extensions.huggingface import __path__ as __path__
from zerotrial.extensions.huggingface import install

__all__ = ["install"]
