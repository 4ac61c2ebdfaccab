"""Settings of a search: options of the command, and DeepSpeed's ``autotuning`` block."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from zerolab.errors import ConfigError
from zerotrial.extensions.autotune.search import Method, Metric

__all__ = ["Settings", "read_block"]

_METRICS: Mapping[str, Metric] = {
    "throughput": "throughput",
    "latency": "latency",
    "memory": "memory",
    "flops": "throughput",  # a batch has the same operations in each candidate
}
_TUNERS: Mapping[str, Method] = {
    "gridsearch": "grid",
    "random": "random",
    "model_based": "guided",
}
_WITHOUT_EFFECT = {
    "enabled": "the command starts the search",
    "exps_dir": "runs are in results_dir and are deleted after their end",
    "metric_path": "results are in results_dir",
    "model_info": "the model is profiled",
    "model_info_path": "the model is profiled",
    "mp_size": "ranks are divided as the model says",
    "num_tuning_micro_batch_sizes": "all divisors of the batch that differ by a factor of 2",
    "max_train_batch_size": "the batch of the file is kept, as it changes what is learned",
    "min_train_batch_size": "the batch of the file is kept, as it changes what is learned",
}
_COUNTS = {
    "start_profile_step": "warmup",
    "tuner_early_stopping": "patience",
    "tuner_num_trials": "max_candidates",
    "min_train_micro_batch_size_per_gpu": "lowest",
    "max_train_micro_batch_size_per_gpu": "highest",
}
"""Keys that are positive integers, by the setting that they are."""
_OTHER_KEYS = frozenset(
    {"fast", "metric", "tuner_type", "results_dir", "overwrite", "arg_mappings", "end_profile_step"}
)


@dataclass(frozen=True)
class Settings:
    """Settings of a search."""

    metric: Metric = "throughput"
    method: Method = "guided"
    steps: int = 20
    """Measured optimizer steps in the last rung."""
    warmup: int = 2
    """Steps before the measured ones."""
    max_candidates: int = 50
    patience: int | None = None
    """Candidates without improvement after which exploration ends."""
    lowest: int = 1
    """Smallest micro-batch."""
    highest: int | None = None
    """Largest micro-batch; None: the batch of a rank."""
    only_stage: bool = False
    """Keep checkpointing and bucket sizes of the file."""
    results_dir: Path = Path("autotuning_results")
    restart: bool = False
    """Delete earlier results instead of continuing them."""
    mappings: Mapping[str, str] = field(default_factory=dict)
    """Arguments of the script by the key of the engine file that they repeat."""
    memory_bytes: int | None = None
    """Memory of a rank; None: what this machine has."""
    timeout_s: float = 600.0
    """Duration of a run."""
    clock: Literal["wall", "cpu"] = "wall"
    """``cpu`` measures the CPU time of rank 0, for a machine that others use, too."""

    def fingerprint(self) -> Any:
        """Return the settings that determine results."""
        names = ("metric", "method", "steps", "warmup", "max_candidates", "patience", "lowest",
                 "highest", "only_stage", "memory_bytes", "clock")  # fmt: skip
        return {name: getattr(self, name) for name in names}


def read_block(
    content: Mapping[str, Any], source: str, settings: Settings
) -> tuple[Settings, list[str]]:
    """Read DeepSpeed's ``autotuning`` block.

    Args:
        content: Engine file.
        source: Its name, for messages.
        settings: Settings of keys that the block lacks.

    Returns:
        The settings, and notes about keys without effect.

    Raises:
        ConfigError: With all problems of the block.

    Example:
        >>> block = {"autotuning": {"metric": "latency", "mp_size": 1}}
        >>> settings, notes = read_block(block, "ds_config.json", Settings())
        >>> settings.metric, notes
        ('latency', ['autotuning.mp_size: ranks are divided as the model says'])
    """
    block = content.get("autotuning")
    if block is None or block is False:
        return settings, []
    if not isinstance(block, Mapping):
        raise ConfigError(source, [f"autotuning: must be a mapping, got {block!r}"])
    problems, changes = _counts(block)
    problems += [
        f"autotuning.{key}: is unknown; remove it"
        for key in block
        if key not in _WITHOUT_EFFECT and key not in _COUNTS and key not in _OTHER_KEYS
    ]
    for read in (_choices, _switches, _paths_and_arguments):
        more, values = read(block)
        problems += more
        changes |= values
    if problems:
        raise ConfigError(source, problems)
    notes = [
        f"autotuning.{key}: {reason}"
        for key, reason in _WITHOUT_EFFECT.items()
        if key in block and key != "enabled"
    ]
    return replace(settings, **changes), notes


def _choices(block: Mapping[str, Any]) -> tuple[list[str], dict[str, Any]]:
    problems: list[str] = []
    changes: dict[str, Any] = {}
    for key, names in (("metric", _METRICS), ("tuner_type", _TUNERS)):
        value = block.get(key)
        if value is not None and not (isinstance(value, str) and value in names):
            problems.append(f"autotuning.{key}: must be {_either(list(names))}, got {value!r}")
        elif value is not None:
            changes["method" if key == "tuner_type" else key] = names[value]
    return problems, changes


def _switches(block: Mapping[str, Any]) -> tuple[list[str], dict[str, Any]]:
    problems: list[str] = []
    changes: dict[str, Any] = {}
    for key, name in (("fast", "only_stage"), ("overwrite", "restart")):
        value = block.get(key)
        if isinstance(value, bool):
            changes[name] = value
        elif value is not None:
            problems.append(f"autotuning.{key}: must be true or false, got {value!r}")
    return problems, changes


def _paths_and_arguments(block: Mapping[str, Any]) -> tuple[list[str], dict[str, Any]]:
    problems: list[str] = []
    changes: dict[str, Any] = {}
    directory = block.get("results_dir")
    if isinstance(directory, str) and directory:
        changes["results_dir"] = Path(directory)
    elif directory is not None:
        problems.append(f"autotuning.results_dir: must be a path, got {directory!r}")
    mappings = block.get("arg_mappings")
    if isinstance(mappings, Mapping) and all(isinstance(v, str) for v in mappings.values()):
        # DeepSpeed's own examples have spaces after a key.
        changes["mappings"] = {str(key).strip(): value for key, value in mappings.items()}
    elif mappings is not None:
        problem = "must be a mapping of keys of this file to arguments of the script"
        problems.append(f"autotuning.arg_mappings: {problem}, got {mappings!r}")
    return problems, changes


def _counts(block: Mapping[str, Any]) -> tuple[list[str], dict[str, Any]]:
    """Read the positive integers; null leaves a setting as it is."""
    problems: list[str] = []
    changes: dict[str, Any] = {}
    for key, name in (*_COUNTS.items(), ("end_profile_step", "steps")):
        value = block.get(key)
        if value is None:
            continue
        if type(value) is not int or value < 1:
            problems.append(f"autotuning.{key}: must be a positive integer, got {value!r}")
        else:
            changes[name] = value
    if "warmup" in changes:
        changes["warmup"] -= 1  # the first profiled step
    if "steps" in changes:
        first = changes.get("warmup", Settings.warmup)
        changes["steps"] -= first
        if changes["steps"] < 1:
            problems.append(
                f"autotuning.end_profile_step: must be at least start_profile_step, {first + 1}, "
                f"got {block['end_profile_step']}"
            )
    return problems, changes


def _either(names: list[str]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"
