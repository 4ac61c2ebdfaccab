"""Public import path of `zerotrial.extensions.pipeline`."""

import importlib
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zerotrial.extensions.pipeline import *  # noqa: F403
else:  # Not an import statement: the engine works without the extension.
    sys.modules[__name__] = importlib.import_module("zerotrial.extensions.pipeline")
