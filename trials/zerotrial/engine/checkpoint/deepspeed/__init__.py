"""Public import path of `zerotrial.extensions.deepspeed_api.checkpoint_import`."""

import importlib

# Not an import statement: the engine works without the extension.
_moved = importlib.import_module("zerotrial.extensions.deepspeed_api.checkpoint_import")
__path__ = list(_moved.__path__)
