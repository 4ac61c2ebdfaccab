"""The engine as a torch module, for scripts that make it a submodule."""

import inspect
from typing import Any

from torch import nn

__all__ = ["AsModule"]


class AsModule(nn.Module):
    """Makes an engine an ``nn.Module``, as DeepSpeed's is; its parts are those of ``module``.

    Nothing of ``nn.Module`` is kept for the engine itself: each method is the model's, so that
    names have no ``module.`` before them, and an outer module sees the model in the engine's place.
    """

    module: Any

    __setattr__ = object.__setattr__  # type: ignore[assignment]
    __delattr__ = object.__delattr__


def _of_the_model(name: str) -> Any:
    def method(self: AsModule, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.module, name)(*args, **kwargs)

    method.__name__, method.__doc__ = name, "The model's."
    return method


_OWN = ("_get_name",)
for _name, _method in vars(nn.Module).items():
    if inspect.isfunction(_method) and not _name.startswith("__") and _name not in _OWN:
        setattr(AsModule, _name, _of_the_model(_name))
