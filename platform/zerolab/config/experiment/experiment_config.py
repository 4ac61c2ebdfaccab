"""The experiment file: Determined's field names, types and defaults, checked as a whole."""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from zerolab.config.experiment.entrypoint import (
    determined_launcher_problem,
    parse_entrypoint,
)
from zerolab.config.experiment.layers import EXTENDS, read_experiment
from zerolab.config.experiment.resources import ResourcesConfig, resource_problems
from zerolab.config.experiment.sections import (
    EnvironmentConfig,
    LogPolicy,
    NotifyConfig,
    ProfilingConfig,
    ReproducibilityConfig,
    RetentionPolicyConfig,
)
from zerolab.config.experiment.storage import CheckpointStorageConfig, storage_problems
from zerolab.contract.limits import LABEL_CHARACTERS, LABELS, LOG_POLICIES, NAME_CHARACTERS
from zerolab.contract.names import check_name, check_project, check_text
from zerolab.contract.secrets import masked_paths
from zerolab.contract.spec import TrialClass
from zerolab.errors import ConfigError
from zerolab.registry import PARTS
from zerolab.schema.hyperparameters import space_problems
from zerolab.schema.json_values import json_value_problems, to_json_values
from zerolab.schema.lengths import Length
from zerolab.schema.section import (
    Count,
    NonNegativeInt,
    OneOf,
    PositiveInt,
    Section,
    dotted,
    drop_nulls,
    validate,
)
from zerolab.searcher.registry import SEARCHERS
from zerolab.searcher.section import SearcherConfig

__all__ = [
    "REMOVED_BACKEND",
    "ExperimentConfig",
    "ExperimentFile",
    "load_experiment",
    "parse_experiment",
]

REMOVED_BACKEND = (
    "remove it to train with Zerolab's engine; for DeepSpeed's own engine call "
    "deepspeed.initialize() in the trial and give the engine to context.wrap_model_engine()"
)
"""Replacement of ``backend: deepspeed``."""

DEFAULT_LOG_POLICIES = (
    # Not checked here: the patterns' library is only imported for experiments with patterns.
    LogPolicy.model_construct(name="CUDA OOM", pattern=".*CUDA out of memory.*"),
    LogPolicy.model_construct(name="ECC Error", pattern=".*uncorrectable ECC error encountered.*"),
)
"""Default log policies; a policy of the same name replaces one."""


def effective_log_policies(policies: Sequence[LogPolicy]) -> list[LogPolicy]:
    """Return the given policies and the defaults that they do not replace."""
    names = {policy.name for policy in policies if policy.name}
    defaults = [policy for policy in DEFAULT_LOG_POLICIES if policy.name not in names]
    return [policy for policy in (*policies, *defaults) if policy.pattern]


def _entrypoint(value: Any) -> Any:
    parse_entrypoint(value)
    return value


class ExperimentConfig(Section):
    """Content of an experiment file; attributes are named as its fields.

    :func:`load_experiment` reads it.

    Example:
        >>> searcher = {"name": "single", "metric": "loss"}
        >>> content = {"entrypoint": "python train.py", "searcher": searcher}
        >>> zerolab.config.load_experiment(content).resources.slots_per_trial
        1
    """

    name: Annotated[
        str, Field(min_length=1, max_length=NAME_CHARACTERS), AfterValidator(check_name)
    ] = "experiment"
    """Name of the experiment."""

    description: Annotated[str, AfterValidator(check_text)] | None = None
    """Description in one line."""

    labels: Annotated[
        list[Annotated[str, Field(max_length=LABEL_CHARACTERS), AfterValidator(check_name)]],
        Field(max_length=LABELS),
    ] = Field(default_factory=list)
    """Labels for searching."""

    project: Annotated[str, AfterValidator(check_project)] | None = None
    """Project of the server (``zerolab project list``); ``default`` if it is not given."""

    data: dict[str, Any] = Field(default_factory=dict)
    """Free for the trial's use: ``context.get_data_config()``. The key ``stage`` copies data to
    each machine first."""

    entrypoint: Annotated[Any, AfterValidator(_entrypoint)]
    """``module:Class`` of a ZeroTrial, or a command as text or as a list of words."""

    hyperparameters: dict[str, Any] = Field(default_factory=dict)
    """Constants and search specs at any depth; ``deepspeed_config`` is the path or the content of
    the engine file, ``overwrite_deepspeed_args`` is merged into it."""

    searcher: Annotated[SearcherConfig, OneOf(SEARCHERS)]
    """Searcher that creates the trials."""

    resources: ResourcesConfig = ResourcesConfig()
    """Slots and machines of each trial."""

    max_restarts: Annotated[NonNegativeInt, Field(le=1_000_000)] = 5
    """Maximum number of restarts of a failed trial, from its last checkpoint."""

    min_validation_period: Length = Length(batches=0)
    """Period of validation; 0 means only at the end of training."""

    min_checkpoint_period: Length = Length(batches=0)
    """Period of checkpoints; 0 means only according to ``checkpoint_policy`` and at the end."""

    checkpoint_policy: Literal["best", "all", "none"] = "best"
    """Checkpoint after a validation: if it is the trial's best, always, or never."""

    checkpoint_storage: CheckpointStorageConfig = CheckpointStorageConfig()
    """Storage and retention of checkpoints."""

    perform_initial_validation: bool = False
    """Validate before the first batch."""

    scheduling_unit: PositiveInt = 100
    """Batches between reports of training metrics."""

    records_per_epoch: NonNegativeInt = 0
    """Samples in an epoch, for training data that has no length; 0 means unknown."""

    reproducibility: ReproducibilityConfig = ReproducibilityConfig()
    """Random seeds."""

    environment: EnvironmentConfig = EnvironmentConfig()
    """Environment of a trial's processes."""

    log_policies: Annotated[list[LogPolicy], Field(max_length=LOG_POLICIES)] = Field(
        default_factory=list
    )
    """Actions for lines of a trial's log that match a pattern."""

    notify: NotifyConfig = NotifyConfig()
    """Messages to notification channels about events of the experiment."""

    preemption_timeout: Count = 3600
    """Seconds that a run may take to checkpoint and exit when it is preempted. A command that never
    polls for preemption is killed after this time, with a line in its log; ``cancel`` kills it
    immediately."""

    retention_policy: RetentionPolicyConfig = RetentionPolicyConfig()
    """Retention of logs."""

    profiling: ProfilingConfig = ProfilingConfig()
    """Timings of the training loop."""

    @property
    def trial_class(self) -> TrialClass | None:
        """Return module and class of the entrypoint; None for a command."""
        parsed = parse_entrypoint(self.entrypoint)
        return parsed if isinstance(parsed, TrialClass) else None

    def policies(self) -> list[LogPolicy]:
        """Return the effective log policies.

        Returns:
            The file's policies, and defaults that it does not replace.

        Example:
            >>> searcher = {"name": "single", "metric": "loss"}
            >>> content = {"entrypoint": "python train.py", "searcher": searcher}
            >>> [policy.name for policy in zerolab.config.load_experiment(content).policies()]
            ['CUDA OOM', 'ECC Error']
        """
        return effective_log_policies(self.log_policies)

    def to_dict(self) -> dict[str, Any]:
        """Return the complete file as plain values, with defaults.

        Returns:
            JSON types, which :func:`load_experiment` can read again.

        Example:
            >>> searcher = {"name": "single", "metric": "loss"}
            >>> content = {"entrypoint": "python train.py", "searcher": searcher}
            >>> zerolab.config.load_experiment(content).to_dict()["max_restarts"]
            5
        """
        return self.model_dump(mode="json")


@dataclass(frozen=True)
class ExperimentFile:
    """Result of reading an experiment file."""

    config: ExperimentConfig | None
    problems: list[str]
    bad: frozenset[str]
    """Dotted fields with errors; they have their defaults in ``config``."""


def load_experiment(source: str | PathLike[str] | Mapping[str, Any]) -> ExperimentConfig:
    """Read and check an experiment file.

    The engine file that it names is not read; see :func:`check_experiment`.

    Args:
        source: Path of a YAML file, or its content.

    Returns:
        The configuration, with all defaults.

    Raises:
        ConfigError: With every problem of the file.

    Example:
        >>> experiment = zerolab.config.load_experiment({
        ...     "name": "digits",
        ...     "entrypoint": "model_def:DigitsTrial",
        ...     "hyperparameters": {"lr": {"type": "log", "minval": -4, "maxval": -1}},
        ...     "searcher": {"name": "random", "metric": "loss", "max_trials": 4,
        ...                  "max_length": {"epochs": 3}},
        ... })
        >>> experiment.searcher.max_trials, experiment.searcher.max_length.epochs
        (4, 3)
    """
    name = "experiment" if isinstance(source, Mapping) else str(source)
    content = to_json_values(source) if isinstance(source, Mapping) else read_experiment(source)
    parsed = parse_experiment(content)
    if parsed.problems or parsed.config is None:
        raise ConfigError(name, parsed.problems)
    return parsed.config


def parse_experiment(content: Mapping[str, Any]) -> ExperimentFile:
    """Check the content of an experiment file and collect all its errors."""
    unfit = json_value_problems(content)
    if unfit:
        return ExperimentFile(None, unfit, frozenset())
    problems: list[str] = []
    if EXTENDS in content:
        content = dict(content)
        problems.append(
            f"{EXTENDS}: must be merged before the submission, got {content.pop(EXTENDS)!r}; use "
            "`zerolab submit FILE`, or `zerolab.config.load_experiment(FILE).to_dict()`"
        )
    if unsupported := PARTS.find("unsupported_fields"):
        content, other_problems = unsupported.without_unsupported(content, _OPAQUE)
        problems += other_problems
    config, invalid, paths = validate(ExperimentConfig, drop_nulls(content, _OPAQUE))
    problems += [_with_remedy(line) for line in invalid] + list(_mask_problems(content))
    bad = frozenset(dotted(path) for path in paths)
    if config is not None:
        wrong_keys = {problem.partition(": ")[0] for problem in problems}
        problems += [line for line in _checks(config) if not _is_repeated(line, wrong_keys)]
        return ExperimentFile(config, _without_misspelt(problems), bad)
    space = content.get("hyperparameters")
    if isinstance(space, Mapping):
        problems += space_problems(space)
    return ExperimentFile(None, _without_misspelt(problems), bad)


_MISSPELT = re.compile(r"(.*?)[^.]+: unknown key; did you mean '(.+)'\?")


def _without_misspelt(problems: Sequence[str]) -> list[str]:
    """Drop problems of missing keys that are there, but misspelt."""
    matches = filter(None, map(_MISSPELT.fullmatch, problems))
    misspelt = tuple(f"{match[1]}{match[2]}: is required" for match in matches)
    return [problem for problem in problems if not problem.startswith(misspelt)]


_NO_SEARCHER = "searcher: is required, got nothing"


def _with_remedy(problem: str) -> str:
    """Add the remedy to the problem of a file without a searcher, such as a task's."""
    if problem != _NO_SEARCHER:
        return problem
    return (
        f"{problem}; add searcher: {{name: single}} to run it once, or run its command with "
        "`zerolab task run -- COMMAND`"
    )


def _mask_problems(content: Mapping[str, Any]) -> Iterator[str]:
    """Reject masks instead of secrets; the storage's check covers its credentials."""
    for path in masked_paths(content):
        if not path.startswith("checkpoint_storage."):
            yield (
                f"{path}: must be the value itself, got the mask that responses show instead; "
                "write the value"
            )


def _is_repeated(problem: str, wrong_keys: Collection[str]) -> bool:
    """Return whether a problem is about a key that is already wrong, or its block."""
    key = problem.partition(": ")[0]
    return any(wrong == key or wrong.startswith(f"{key}.") for wrong in wrong_keys)


_OPAQUE = frozenset({"hyperparameters", "data"})
"""Blocks whose content belongs to the user."""


def _checks(config: ExperimentConfig) -> Iterator[str]:
    """Yield violated rules between fields."""
    launcher_problem = determined_launcher_problem(config.entrypoint)
    if launcher_problem and config.environment.determined is None:
        yield f"entrypoint: {launcher_problem}"
    searcher = config.searcher
    searcher_problems = list(searcher.problems(config.hyperparameters))
    yield from searcher_problems
    is_reported = any(line.startswith("searcher.max_length: ") for line in searcher_problems)
    if searcher.full_length is None and config.trial_class is not None and not is_reported:
        yield (
            "searcher.max_length: is required for a trial class, got nothing; set the length, "
            "e.g. {batches: 1000}"
        )
    yield from storage_problems(config.checkpoint_storage)
    if (stage := config.data.get("stage")) is not None:
        problem = PARTS.problem("stage")
        yield from [f"data.stage: {problem}"] if problem else PARTS["stage"].stage_problems(stage)
    profiling = config.profiling
    last = profiling.end_after_batch
    if last is not None and last < profiling.begin_on_batch:
        yield (
            "profiling.end_after_batch: must not be less than begin_on_batch = "
            f"{profiling.begin_on_batch}, got {last}"
        )
    yield from resource_problems(config.resources, is_class=config.trial_class is not None)
