"""Public import path of `zerotrial.extensions.full_weights.export`."""

import importlib

# Not an import statement: the engine works without the extension.
read_weights = importlib.import_module("zerotrial.extensions.full_weights.export").read_weights
