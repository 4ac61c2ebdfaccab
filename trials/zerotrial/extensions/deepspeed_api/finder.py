"""Finder of the module ``deepspeed`` and of the version of its distribution.

One object on ``sys.meta_path`` answers for the modules and for ``importlib.metadata``. A module
takes its names from one of ours. Every other name, and every other module, can be imported and
fails when it is used: scripts import much that they do not use.
"""

import importlib
import importlib.util
import os
import sys
from collections.abc import Iterable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import Distribution, DistributionFinder
from os import PathLike
from types import ModuleType
from typing import Any

from zerolab.contract.spec import ENV_AS_DEEPSPEED
from zerolab.errors import ConfigError
from zerotrial.extensions.deepspeed_api.unsupported import missing_name

__all__ = ["VERSION", "install"]

VERSION = "0.19.8"
"""Of DeepSpeed, whose calls are answered."""

_NAMES = "zerotrial.extensions.deepspeed_api.names"

_MODULES = {
    "deepspeed": "root",
    "deepspeed.accelerator": "accelerator",
    "deepspeed.accelerator.real_accelerator": "accelerator",
    "deepspeed.checkpoint": "",
    "deepspeed.checkpoint.utils": "checkpoint_utils",
    "deepspeed.checkpointing": "checkpointing",
    "deepspeed.comm": "comm",
    "deepspeed.comm.comm": "comm",
    "deepspeed.comm.reduce_op": "comm",
    "deepspeed.compression.helper": "utils",
    "deepspeed.launcher": "",
    "deepspeed.launcher.runner": "launcher",
    "deepspeed.ops": "",
    "deepspeed.ops.adagrad": "ops",
    "deepspeed.ops.adagrad.cpu_adagrad": "ops",
    "deepspeed.ops.adam": "ops",
    "deepspeed.ops.adam.cpu_adam": "ops",
    "deepspeed.ops.adam.fused_adam": "ops",
    "deepspeed.ops.lamb": "ops",
    "deepspeed.ops.lamb.fused_lamb": "ops",
    "deepspeed.ops.lion": "ops",
    "deepspeed.ops.lion.cpu_lion": "ops",
    "deepspeed.ops.lion.fused_lion": "ops",
    "deepspeed.pipe": "pipe",
    "deepspeed.runtime": "",
    "deepspeed.runtime.activation_checkpointing": "",
    "deepspeed.runtime.activation_checkpointing.checkpointing": "checkpointing",
    "deepspeed.runtime.base_optimizer": "base_optimizer",
    "deepspeed.runtime.dataloader": "utils",
    "deepspeed.runtime.engine": "root",
    "deepspeed.runtime.lr_schedules": "lr_schedules",
    "deepspeed.runtime.pipe": "pipe",
    "deepspeed.runtime.pipe.engine": "pipe",
    "deepspeed.runtime.pipe.module": "pipe",
    "deepspeed.runtime.pipe.topology": "pipe",
    "deepspeed.runtime.utils": "runtime_utils",
    "deepspeed.runtime.zero": "zero",
    "deepspeed.runtime.zero.offload_config": "zero",
    "deepspeed.runtime.zero.partition_parameters": "zero",
    "deepspeed.sequence": "",
    "deepspeed.sequence.layer": "sequence.layer",
    "deepspeed.utils": "utils",
    "deepspeed.utils.init_on_device": "utils",
    "deepspeed.utils.logging": "utils",
    "deepspeed.utils.z3_leaf_module": "z3_leaf_module",
    "deepspeed.utils.zero_to_fp32": "zero_to_fp32",
    "deepspeed.zero": "zero",
}
"""Modules of DeepSpeed to those that have their names; empty for packages of modules alone."""

_ON_DEMAND = {
    "deepspeed.PipelineEngine": "deepspeed.pipe",
    "deepspeed.PipelineModule": "deepspeed.pipe",
    "deepspeed.runtime.pipe.engine.DeepSpeedEngine": "deepspeed",
}
"""Names that few scripts ask for, to modules that take time to import."""


def install(*, force: bool = False) -> None:
    """Make ``import deepspeed`` find the replacement, in this process and its children.

    A second call does nothing.

    Args:
        force: Whether to replace a real installation, too.

    Raises:
        ConfigError: If a real installation can be or has been imported.
    """
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    real = _real_installation()
    if real is not None and not force:
        raise ConfigError(
            "zerotrial.extensions.deepspeed_api",
            [
                f"deepspeed: must not be installed where Zerolab replaces it, found {real}; "
                f"uninstall it, use an environment without it, or set {ENV_AS_DEEPSPEED}=force"
            ],
        )
    for name in [name for name in sys.modules if name.partition(".")[0] == "deepspeed"]:
        del sys.modules[name]
    sys.meta_path.insert(0, _Finder())
    os.environ[ENV_AS_DEEPSPEED] = "force" if force else "1"
    importlib.invalidate_caches()
    from zerotrial.extensions.deepspeed_api import (
        cpu_support,
        pretrained,
        sample_counting,
        save_hooks,
    )

    cpu_support.patch_when_imported()
    save_hooks.patch_when_imported()
    pretrained.patch_when_imported()
    sample_counting.patch_when_imported()


def _real_installation() -> str | None:
    """Return the location of a real deepspeed; None without one."""
    if "deepspeed" in sys.modules:
        return str(getattr(sys.modules["deepspeed"], "__file__", "in this process"))
    spec = PathFinder.find_spec("deepspeed")
    return None if spec is None else str(spec.origin or "a folder of that name")


class _Finder(MetaPathFinder):
    """Answers for ``deepspeed`` and all below it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """See :class:`importlib.abc.MetaPathFinder`."""
        del path, target
        if fullname.partition(".")[0] != "deepspeed":
            return None
        return ModuleSpec(fullname, _Loader(_MODULES.get(fullname, "")), is_package=True)

    def find_distributions(
        self, context: DistributionFinder.Context | None = None
    ) -> Iterable[Distribution]:
        """Provide the version to ``importlib.metadata``."""
        name = getattr(context, "name", None)
        return [_Distribution()] if name in {None, "deepspeed"} else []


class _Loader(Loader):
    """Fills a module with the public names of one of ours, if it has one."""

    def __init__(self, source: str) -> None:
        self._source = source

    def exec_module(self, module: ModuleType) -> None:
        """See :class:`importlib.abc.Loader`."""
        if self._source:
            replacement = importlib.import_module(f"{_NAMES}.{self._source}")
            for name in replacement.__all__:
                setattr(module, name, getattr(replacement, name))
            module.__doc__ = replacement.__doc__
            module.__file__ = replacement.__file__

        def find(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")
            with_dot = f"{module.__name__}.{name}"
            if with_dot in _MODULES:
                return importlib.import_module(with_dot)
            if with_dot in _ON_DEMAND:
                return getattr(importlib.import_module(_ON_DEMAND[with_dot]), name)
            return missing_name(module.__name__, name)

        module.__getattr__ = find  # type: ignore[method-assign]


class _Distribution(Distribution):
    """Distribution that ``importlib.metadata`` finds."""

    def read_text(self, filename: str) -> str | None:
        """See :class:`importlib.metadata.Distribution`."""
        if filename == "METADATA":
            return f"Metadata-Version: 2.1\nName: deepspeed\nVersion: {VERSION}\n"
        return None

    def locate_file(self, path: str | PathLike[str]) -> Any:
        """See :class:`importlib.metadata.Distribution`."""
        return path
