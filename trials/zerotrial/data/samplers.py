"""Public import path of `zerotrial.extensions.samplers`."""

import importlib
import sys

# Not an import statement: trials work without the extension.
sys.modules[__name__] = importlib.import_module("zerotrial.extensions.samplers")
