"""Public classes and functions of Zerolab, and the problems of their docstrings."""

import ast
import importlib
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from types import ModuleType
from typing import Any

import zerotrial

MODULES: dict[str, tuple[str, ...]] = {
    "zerotrial": tuple(name for name in zerotrial.__all__ if name not in {"TorchData", "samplers"}),
    "zerotrial.data.samplers": (
        "DistributedBatchSampler",
        "DistributedSampler",
        "RepeatBatchSampler",
        "RepeatSampler",
        "ReproducibleShuffleBatchSampler",
        "ReproducibleShuffleSampler",
        "SkipBatchSampler",
        "SkipSampler",
    ),
    "zerotrial.engine": ("Engine", "model_in_files"),
    "zerotrial.engine.checkpoint.engine_checkpoint": ("EngineCheckpoint",),
    "zerotrial.engine.loss_scale": ("DynamicLossScaler",),
    "zerotrial.engine.lr_schedules": (
        "LRSchedule",
        "LRRangeTest",
        "OneCycle",
        "WarmupCosineLR",
        "WarmupDecayLR",
        "WarmupLR",
    ),
    "zerotrial.engine.memory": ("estimate",),
    "zerotrial.engine.pipeline": ("partition",),
    "zerotrial.engine.progress": ("Progress",),
    "zerotrial.extensions.full_weights.weights": ("FullWeights",),
    "zerotrial.loop.fit_result": ("FitResult", "History", "SavedCheckpoint", "Series"),
    "zerolab": ("Client",),
    "zerolab.client.archive": ("pack", "unpack"),
    "zerolab.client.objects": tuple(importlib.import_module("zerolab.client.objects").__all__),
    "zerolab.client.search": ("serve",),
    "zerolab.config": (
        "BatchSizes",
        "EngineConfig",
        "ExperimentConfig",
        "check_experiment",
        "check_file",
        "grid_points",
        "load_engine_config",
        "load_experiment",
        "overwrite_deepspeed_config",
        "resolve",
        "sample_hyperparameters",
    ),
    "zerolab.core": ("Context", "current", "init"),
    "zerolab.core.context": ("CheckpointContext", "PreemptContext", "TrainContext"),
    "zerolab.core.socket_ranks": ("SocketRanks",),
    "zerolab.errors": tuple(importlib.import_module("zerolab.errors").__all__),
    "zerolab.launcher.hostfile": ("filter_slots", "parse_hostfile"),
    "zerolab.launcher.interface": ("Launcher", "LauncherProcess"),
    "zerolab.searcher": tuple(
        name
        for name in importlib.import_module("zerolab.searcher").__all__
        if name not in {"ExitReason", "Operation"}
    ),
    "zerolab.searcher.asha": ("make_brackets", "make_rungs", "simulate"),
    "zerolab.searcher.section": ("SearcherConfig",),
    "zerolab.storage.objects": ("ObjectStore",),
    "zerolab.storage.section": ("StorageConfig",),
    "zeroserver.access.routes": ("declare_access",),
}
"""Module -> its public names. Methods of public classes are public as well."""

INTERFACES = frozenset(
    {
        "Callback",
        "Launcher",
        "LauncherProcess",
        "LRSchedule",
        "MetricReducer",
        "ObjectStore",
        "Searcher",
        "ExternalSearcher",
        "SearcherConfig",
        "StorageConfig",
        "ZeroTrial",
    }
)
"""Classes that users implement: the class has the example, its methods need none."""

RUN_METHODS = frozenset(
    f"zerolab.Client.{name}"
    for name in (
        "directive",
        "extend",
        "report",
        "run_activity",
        "run_exited",
        "run_meeting",
        "run_started",
        "ship_logs",
    )
)
"""Methods that only agents and runs call: they need no example."""

INTERNAL = (
    "zerolab.core.Context.show_results_in",
    "zerolab.core.context.CheckpointContext",  # made by init
    "zerolab.core.context.PreemptContext",
    "zerolab.core.context.TrainContext",
    "zerolab.core.context.TrainContext.report_machine",
    "zerolab.core.context.TrainContext.report_machines",
    "zerolab.core.context.TrainContext.take_machine",
    "zerotrial.DataLoader.plan",
    "zerotrial.DataLoader.training_batches",
    "zerotrial.DataLoader.validation_loader",
    "zerotrial.PipelineModule.chunk",
    "zerotrial.PipelineModule.check_config",
    "zerotrial.PipelineModule.check_ties",
    "zerotrial.PipelineModule.end_of",
    "zerotrial.PipelineModule.prepare",
    "zerotrial.PipelineModule.read_by_others",
    "zerotrial.PipelineModule.set_recompute",
    "zerotrial.ZeroTrialContext.begin_training",
    "zerotrial.ZeroTrialContext.close",
    "zerotrial.ZeroTrialContext.enter_batch",
    "zerotrial.ZeroTrialContext.log_to_tensorboard",
    "zerotrial.ZeroTrialContext.use_run",
    "zerotrial.engine.checkpoint.engine_checkpoint.EngineCheckpoint",  # made by initialize
    "zerotrial.engine.lr_schedules.WarmupCosineLR.ratio",
    "zerotrial.engine.lr_schedules.WarmupDecayLR.share",
    "zerotrial.engine.lr_schedules.WarmupLR.share",
    "zerotrial.engine.progress.Progress.end_micro_batch",
    "zerotrial.engine.progress.Progress.load_state_dict",
    "zerotrial.engine.progress.Progress.pass_boundary",
    "zerotrial.engine.progress.Progress.reset_backwards",
    "zerotrial.engine.progress.Progress.resize",
    "zerotrial.engine.progress.Progress.resume_window",
    "zerotrial.engine.progress.Progress.return_to_boundary",
    "zerotrial.engine.progress.Progress.state_dict",
    "zerotrial.engine.progress.Progress.window",
    "zerolab.client.objects.MetricsTable",  # made by metrics()
    "zerolab.client.objects.ServerObject",  # made by the client
    "zerolab.config.EngineConfig.batch_problem",
    "zerolab.config.EngineConfig.layout_problem",
    "zerolab.config.EngineConfig.sums_micro_batches",
    "zerolab.config.EngineConfig.with_origin",
)
"""Objects that Zerolab makes or calls itself: they need no arguments and no example."""


@dataclass(frozen=True)
class Item:
    """A public class, function, method or property.

    Args:
        name: Name with its module, for example ``zerotrial.Trainer.fit``.
        value: The object.
        owner: Class of a method.
        is_property: Whether it is read like an attribute.
    """

    name: str
    value: Any
    owner: type | None = None
    is_property: bool = False

    @property
    def doc(self) -> str:
        """Docstring without indentation, or an empty text."""
        return inspect.getdoc(self.value) or ""


def public_items() -> Iterator[Item]:
    """Yield each public item once."""
    seen: set[int] = set()
    for module_name, names in MODULES.items():
        module = importlib.import_module(module_name)
        for name in names:
            value = getattr(module, name)
            if id(value) in seen:
                continue
            seen.add(id(value))
            yield Item(f"{module_name}.{name}", value)
            if not inspect.isclass(value):
                continue
            for item in _members(f"{module_name}.{name}", value):
                if id(item.value) not in seen:
                    seen.add(id(item.value))
                    yield item


def _members(prefix: str, owner: type) -> Iterator[Item]:
    overridden: set[str] = set()
    for base in owner.__mro__:
        if not base.__module__.startswith(("zerolab", "zerotrial", "zeroserver")):
            continue
        for name, raw in vars(base).items():
            if name.startswith("_") or name in overridden or isinstance(raw, ModuleType):
                continue
            if name == "model_post_init":  # pydantic's
                continue
            overridden.add(name)
            if isinstance(raw, property):
                yield Item(f"{prefix}.{name}", raw.fget, owner, is_property=True)
            elif isinstance(raw, classmethod | staticmethod):
                yield Item(f"{prefix}.{name}", raw.__func__, owner)
            elif inspect.isfunction(raw):
                yield Item(f"{prefix}.{name}", raw, owner)


def docstring_problems(item: Item) -> list[str]:
    """Return the missing parts of an item's docstring."""
    first = item.doc.split("\n", 1)[0]
    problems = []
    if not 4 <= len(re.findall(r"[\w`'.:/-]*\w[\w`'.:/-]*", first)) <= 12:
        problems.append("first line: must have 4 to 12 words")
    if item.is_property or item.name in INTERNAL or _is_override(item):
        return problems
    parts = sections(item.doc)
    problems += [
        f"Args: lacks {name}" for name in _parameters(item) if name not in parts.get("Args", {})
    ]
    is_class = inspect.isclass(item.value)
    if not is_class:
        returns = inspect.signature(item.value).return_annotation
        if returns not in (None, "None", inspect.Signature.empty, "NoReturn") and not (
            {"Returns", "Yields"} & parts.keys()
        ):
            problems.append("Returns: is missing")
        documented = " ".join(parts.get("Raises", {}))
        problems += [
            f"Raises: lacks {name}"
            for name in sorted(_raised(item.value))
            if name not in documented
        ]
    implemented = item.owner is not None and item.owner.__name__ in INTERFACES
    has_example = "Example" in parts and ">>>" in item.doc
    if not has_example and not implemented and item.name not in RUN_METHODS:
        problems.append("Example: is missing")
    return problems


def sections(doc: str) -> dict[str, dict[str, str]]:
    """Return the entries of each section of a docstring in Google style."""
    result: dict[str, dict[str, str]] = {}
    parts = re.split(r"^(Args|Returns|Yields|Raises|Example|Attributes):+$", doc, flags=re.M)
    for heading, text in zip(parts[1::2], parts[2::2], strict=True):
        entries = re.findall(r"^([*\w., ]+)(?: \([^)]*\))?:", textwrap.dedent(text), re.M)
        result[heading] = {
            name.strip(" *"): entry for entry in entries for name in entry.split(",")
        }
    return result


def _parameters(item: Item) -> list[str]:
    value = item.value
    if inspect.isclass(value):
        if issubclass(value, Enum) or "section" in vars(value) or _is_protocol(value):
            return []
        if "__init__" not in vars(value):
            return list(getattr(value, "__struct_fields__", ()))
        value = value.__init__
    names = list(inspect.signature(value).parameters)
    return [name for name in names if name not in {"self", "cls"} and not name.startswith("_")]


def _is_override(item: Item) -> bool:
    """Return whether a method is documented by the interface that its class implements."""
    bases = item.owner.__mro__[1:] if item.owner is not None else ()
    method = item.name.rpartition(".")[2]
    return any(base.__name__ in INTERFACES and hasattr(base, method) for base in bases)


def _is_protocol(value: type) -> bool:
    return bool(getattr(value, "_is_protocol", False))


def _raised(function: Callable[..., Any]) -> set[str]:
    """Return the names of exceptions that a function's own statements raise."""
    function = inspect.unwrap(function)
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    except (OSError, TypeError, SyntaxError):
        return set()
    names = set()
    pending = list(ast.iter_child_nodes(tree))
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            name = getattr(node.exc.func, "id", "")
            if name and name[0].isupper():
                names.add(name)
        pending += ast.iter_child_nodes(node)
    return names - {"NotImplementedError"}
