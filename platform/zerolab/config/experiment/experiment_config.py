"""The experiment file: Determined's field names, types and defaults, checked as a whole."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from zerolab.config.experiment.entrypoint import parse_entrypoint
from zerolab.config.experiment.resources import ResourcesConfig, resource_problems
from zerolab.config.experiment.sections import (
    EnvironmentConfig,
    LogPolicy,
    ProfilingConfig,
    ReproducibilityConfig,
    RetentionPolicyConfig,
    stage_problems,
)
from zerolab.config.experiment.storage import CheckpointStorageConfig, storage_problems
from zerolab.config.experiment.unsupported_fields import (
    OTHER_SEARCHER_KEYS,
    OTHER_SEARCHERS,
    REFUSED_FIELDS,
)
from zerolab.config.files import read_yaml
from zerolab.config.unsupported import take_refused
from zerolab.contract.limits import LABEL_CHARACTERS, LABELS, LOG_POLICIES, NAME_CHARACTERS
from zerolab.contract.names import check_name, check_text
from zerolab.contract.secrets import masked_paths
from zerolab.contract.spec import TrialClass
from zerolab.errors import ConfigError
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

__all__ = ["ExperimentConfig", "ExperimentFile", "load_experiment", "parse_experiment"]

DEFAULT_LOG_POLICIES = (
    # Not checked here: the patterns' library is loaded by those who have patterns of their own.
    LogPolicy.model_construct(name="CUDA OOM", pattern=".*CUDA out of memory.*"),
    LogPolicy.model_construct(name="ECC Error", pattern=".*uncorrectable ECC error encountered.*"),
)
"""Labels that every experiment has unless it names a policy of its own so."""


def policies_in_force(given: Sequence[LogPolicy]) -> list[LogPolicy]:
    """Return the given policies and the defaults that they do not replace."""
    mine = {policy.name for policy in given if policy.name}
    kept = [policy for policy in DEFAULT_LOG_POLICIES if policy.name not in mine]
    return [policy for policy in (*given, *kept) if policy.pattern]


def _entrypoint(value: Any) -> Any:
    parse_entrypoint(value)
    return value


class ExperimentConfig(Section):
    """An experiment file; attributes are named as its fields."""

    name: Annotated[
        str, Field(min_length=1, max_length=NAME_CHARACTERS), AfterValidator(check_name)
    ] = "experiment"
    """What the experiment is called."""

    description: Annotated[str, AfterValidator(check_text)] | None = None
    """A line about it."""

    labels: Annotated[
        list[Annotated[str, Field(max_length=LABEL_CHARACTERS), AfterValidator(check_name)]],
        Field(max_length=LABELS),
    ] = Field(default_factory=list)
    """Words to find it by."""

    data: dict[str, Any] = Field(default_factory=dict)
    """Free for the trial's own use: ``context.get_data_config()``; but ``stage`` has data copied to
    each machine first."""

    entrypoint: Annotated[Any, AfterValidator(_entrypoint)]
    """``module:Class`` of a ZeroTrial, or a command as text or as a list of words."""

    hyperparameters: dict[str, Any] = Field(default_factory=dict)
    """Constants and search specs at any depth; ``deepspeed_config`` names the engine file (or
    holds its content), ``overwrite_deepspeed_args`` is laid over it."""

    searcher: Annotated[SearcherConfig, OneOf(SEARCHERS)]
    """Which trials there are."""

    resources: ResourcesConfig = ResourcesConfig()
    """What each trial runs on."""

    max_restarts: Annotated[NonNegativeInt, Field(le=1_000_000)] = 5
    """How often a trial that fails is started again, from its last checkpoint."""

    min_validation_period: Length = Length(batches=0)
    """How often to validate; 0 means only at the end of training."""

    min_checkpoint_period: Length = Length(batches=0)
    """How often to checkpoint; 0 means only as ``checkpoint_policy`` says and at the end."""

    checkpoint_policy: Literal["best", "all", "none"] = "best"
    """Checkpoint after a validation: if it is the trial's best, always, or never."""

    checkpoint_storage: CheckpointStorageConfig = CheckpointStorageConfig()
    """Where checkpoints are kept, and which of them."""

    perform_initial_validation: bool = False
    """Validate before the first batch."""

    scheduling_unit: PositiveInt = 100
    """Training metrics are reported each time so many batches are done."""

    records_per_epoch: NonNegativeInt = 0
    """Samples in an epoch, for training data that has no length; 0 means unknown."""

    reproducibility: ReproducibilityConfig = ReproducibilityConfig()
    """Randomness."""

    environment: EnvironmentConfig = EnvironmentConfig()
    """What the processes of a trial find around them."""

    log_policies: Annotated[list[LogPolicy], Field(max_length=LOG_POLICIES)] = Field(
        default_factory=list
    )
    """What to do when a line of a trial's log matches a pattern."""

    preemption_timeout: Count = 3600
    """Seconds that a run may take to checkpoint and exit when it is asked to. A command that never
    asks whether it is goes on for so long, and is killed; its log says so. ``cancel`` does not wait
    for such a one."""

    retention_policy: RetentionPolicyConfig = RetentionPolicyConfig()
    """How long logs are kept."""

    profiling: ProfilingConfig = ProfilingConfig()
    """Timings of the training loop."""

    @property
    def trial_class(self) -> TrialClass | None:
        """Module and class of the entrypoint; None when it is a command."""
        parsed = parse_entrypoint(self.entrypoint)
        return parsed if isinstance(parsed, TrialClass) else None

    def policies(self) -> list[LogPolicy]:
        """The log policies in force: the file's, and defaults that it does not replace."""
        return policies_in_force(self.log_policies)

    def to_dict(self) -> dict[str, Any]:
        """The whole file as plain values, defaults filled in; reading it gives the same again."""
        return self.model_dump(mode="json")


@dataclass(frozen=True)
class ExperimentFile:
    """What reading an experiment file gave."""

    config: ExperimentConfig | None
    problems: list[str]
    bad: frozenset[str]
    """Dotted fields that were wrong; they stand at their defaults in ``config``."""


def load_experiment(source: str | PathLike[str] | Mapping[str, Any]) -> ExperimentConfig:
    """Read and check an experiment file, without the engine file that it names.

    Args:
        source: Path of a YAML file, or its content.

    Raises:
        ConfigError: With every problem of the file.
    """
    name = "experiment" if isinstance(source, Mapping) else str(source)
    content = to_json_values(source) if isinstance(source, Mapping) else read_yaml(source)
    parsed = parse_experiment(content)
    if parsed.problems or parsed.config is None:
        raise ConfigError(name, parsed.problems)
    return parsed.config


def parse_experiment(content: Mapping[str, Any]) -> ExperimentFile:
    """Check the content of an experiment file and go on after its mistakes."""
    unfit = json_value_problems(content)
    if unfit:
        return ExperimentFile(None, unfit, frozenset())
    content, problems = _without_other_searcher(content)
    rest, refused, _ = take_refused(content, REFUSED_FIELDS, _OPAQUE)
    config, wrong, paths = validate(ExperimentConfig, drop_nulls(rest, _OPAQUE))
    problems += refused + [_with_remedy(line) for line in wrong] + list(_mask_problems(rest))
    bad = frozenset(dotted(path) for path in paths)
    if config is not None:
        wrong_keys = {problem.partition(": ")[0] for problem in problems}
        problems += [line for line in _checks(config) if not _repeats(line, wrong_keys)]
        return ExperimentFile(config, problems, bad)
    space = content.get("hyperparameters")
    if isinstance(space, Mapping):
        problems += space_problems(space)
    return ExperimentFile(None, problems, bad)


_NO_SEARCHER = "searcher: is required, got nothing"


def _with_remedy(problem: str) -> str:
    """Say what to do about a file without a searcher, such as that of a task."""
    if problem != _NO_SEARCHER:
        return problem
    return (
        f"{problem}; add searcher: {{name: single}} to run it once, or run its command with "
        "`zerolab task run -- COMMAND`"
    )


def _mask_problems(content: Mapping[str, Any]) -> Iterator[str]:
    """Refuse the mask where a secret should be; the storage's own check covers its credentials."""
    for place in masked_paths(content):
        if not place.startswith("checkpoint_storage."):
            yield (
                f"{place}: must be the value itself, got the mask that stands for it in "
                "responses; write the value"
            )


def _repeats(problem: str, wrong_keys: Collection[str]) -> bool:
    """Whether a problem is about a key that is wrong already, or about the block of one."""
    key = problem.partition(": ")[0]
    return any(wrong == key or wrong.startswith(f"{key}.") for wrong in wrong_keys)


_OPAQUE = frozenset({"hyperparameters", "data"})
"""Blocks whose content is the user's own."""


def _without_other_searcher(content: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Refuse a searcher that Determined calls otherwise, in one line.

    Returns:
        The file with a known searcher instead, so that its other mistakes are found, and the
        problems.
    """
    searcher = content.get("searcher")
    name = searcher.get("name") if isinstance(searcher, Mapping) else None
    if (
        not isinstance(searcher, Mapping)
        or not isinstance(name, str)
        or name not in OTHER_SEARCHERS
    ):
        return dict(content), []
    known = {key: value for key, value in searcher.items() if key not in OTHER_SEARCHER_KEYS}
    accepted = {"max_trials": 1, "max_length": 1} | known | {"name": "random"}
    problem = f"searcher.name: {OTHER_SEARCHERS[name]}, got {name!r}"
    return {**content, "searcher": accepted}, [problem]


def _checks(config: ExperimentConfig) -> Iterator[str]:
    """Rules between fields."""
    searcher = config.searcher
    if searcher.max_length is not None and searcher.max_length.count == 0:
        yield "searcher.max_length: must be at least one batch or epoch, got 0"
    told = list(searcher.problems(config.hyperparameters))
    yield from told
    is_told = any(each.startswith("searcher.max_length: ") for each in told)
    if searcher.full_length is None and config.trial_class is not None and not is_told:
        yield (
            "searcher.max_length: is required for a trial class, got nothing; "
            "say how far to train, e.g. {batches: 1000}"
        )
    yield from storage_problems(config.checkpoint_storage)
    yield from stage_problems(config.data)
    profiling = config.profiling
    last = profiling.end_after_batch
    if last is not None and last < profiling.begin_on_batch:
        yield (
            "profiling.end_after_batch: must not be less than begin_on_batch = "
            f"{profiling.begin_on_batch}, got {last}"
        )
    yield from resource_problems(config.resources, is_class=config.trial_class is not None)
