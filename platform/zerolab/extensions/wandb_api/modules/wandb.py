"""The module ``wandb`` of scripts, with the modules below it that frameworks import."""

import sys
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import Any, NoReturn

from zerolab.extensions import wandb_api as _replacement
from zerolab.extensions.wandb_api import *  # noqa: F403 - the same names
from zerolab.extensions.wandb_api import __version__ as __version__
from zerolab.extensions.wandb_api import unsupported as _unsupported
from zerolab.extensions.wandb_api.run_values import Config, ConfigChangeError, Summary
from zerolab.extensions.wandb_api.wandb_run import RunDisabled

__all__ = _replacement.__all__

__path__: list[str] = []
"""A package whose modules are those below, which are in ``sys.modules`` already."""


def __getattr__(name: str) -> Any:
    return getattr(_replacement, name)


class _MissingModules(MetaPathFinder):
    """Explains imports of other modules of wandb."""

    def find_spec(self, fullname: str, *unused: Any) -> None:
        """See :class:`importlib.abc.MetaPathFinder`.

        Raises:
            ModuleNotFoundError: If it is a module of wandb.
        """
        del unused
        if fullname.startswith("wandb."):
            self._fail(fullname)

    def _fail(self, fullname: str) -> NoReturn:
        name = fullname.split(".")[1]
        message = _unsupported.advice(name) or f"{fullname} has no counterpart in Zerolab"
        raise ModuleNotFoundError(message, name=fullname)


def _add_module(name: str, **values: Any) -> None:
    module = ModuleType(f"wandb.{name}")
    module.__path__ = []
    module.__dict__.update(values)
    sys.modules[module.__name__] = module
    parent, _, last = module.__name__.rpartition(".")
    setattr(sys.modules[parent], last, module)


_DATA_TYPES = {
    name: getattr(_replacement, name)
    for name in ("Artifact", "Audio", "Histogram", "Html", "Image", "Table")
}
_add_module("data_types", **_DATA_TYPES)
_add_module("errors", Error=Exception, UsageError=RuntimeError, CommError=ConnectionError)
_add_module("sdk", Artifact=_replacement.Artifact, Config=Config, Summary=Summary)
_add_module("sdk.data_types", **_DATA_TYPES)
_add_module("sdk.lib", RunDisabled=RunDisabled)
_add_module("sdk.lib.config_util", ConfigError=ConfigChangeError)
_add_module("sdk.wandb_config", Config=Config)
_add_module("sdk.wandb_run", Run=_replacement.Run)
_add_module("sdk.wandb_settings", Settings=_replacement.Settings)
_add_module("wandb_run", Run=_replacement.Run)
sys.meta_path.insert(0, _MissingModules())
