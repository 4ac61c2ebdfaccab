"""The blocks of an experiment file."""

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from zerolab.config.experiment.patterns import compile_pattern
from zerolab.contract.names import check_name
from zerolab.contract.notifications import EventName, check_channel_name
from zerolab.contract.secret_text import MASK, is_secret_name
from zerolab.contract.spec import ENV_COLLECTIVE_TIMEOUT
from zerolab.schema.section import (
    NonNegativeInt,
    Section,
)

__all__ = [
    "EnvironmentConfig",
    "LogPolicy",
    "NotifyConfig",
    "ProfilingConfig",
    "ReproducibilityConfig",
    "RetentionPolicyConfig",
]


class ReproducibilityConfig(Section):
    """Random seeds."""

    experiment_seed: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    """Seed of the sampled hyperparameters and of the trials' seeds; random by default."""


def _variables(value: Any) -> Any:
    """Read Determined's forms of variables: one list, or lists by kind of slot."""
    if isinstance(value, EnvironmentVariables):
        return value
    lists = value.values() if isinstance(value, dict) else [value]
    for lines in lists:  # without the values, which may be secrets
        if lines is not None and not isinstance(lines, list):
            raise ValueError(f"must be lists of lines NAME=value, got {type(lines).__name__}")
        if not all(isinstance(line, str) for line in lines or ()):
            raise ValueError("must be lists of lines NAME=value, got one that is no text")
    if isinstance(value, list):
        return {"cpu": value, "cuda": value}
    result = {kind: lines for kind, lines in value.items() if kind not in {"gpu", "rocm"}}
    if value.get("rocm"):
        text = "must be a list, or lists under cpu and cuda, got one under rocm; "
        raise ValueError(text + "ROCm GPUs are not supported: remove it")
    if value.get("gpu"):  # former name of cuda
        if result.get("cuda") not in (None, [], value["gpu"]):
            raise ValueError("gpu is another name for cuda, got both; keep cuda")
        result["cuda"] = value["gpu"]
    return result


_OURS = frozenset(
    {"CUDA_DEVICE_ORDER", "CUDA_VISIBLE_DEVICES", "LOCAL_RANK", "RANK", "WORLD_SIZE"}
    | {"MASTER_ADDR", "MASTER_PORT"}
)
"""Variables that the launcher sets for each rank."""


def _assignments(value: list[str]) -> list[str]:
    for text in value:
        if not re.match(r"[A-Za-z_][A-Za-z0-9_]*=", text):
            shown = MASK if is_secret_name(text) else repr(text)
            raise ValueError(f"must be lines of the form NAME=value, got {shown}")
        name = text.partition("=")[0]
        is_users = name == ENV_COLLECTIVE_TIMEOUT
        if name in _OURS or (name.startswith("ZEROLAB_") and not is_users):
            raise ValueError(f"{name} is set by the platform; remove it")
    return value


Assignments = Annotated[list[str], AfterValidator(_assignments)]


class EnvironmentVariables(Section):
    """Variables by kind of slot."""

    cpu: Assignments = Field(default_factory=list)
    """For ranks on CPU slots."""

    cuda: Assignments = Field(default_factory=list)
    """For ranks on GPUs."""


def _python(value: str) -> str:
    if not value.startswith(("/", "~")):
        hint = "`conda env list` shows where conda's environments are"
        raise ValueError(f"must be a path that begins with / or ~, got {value!r}; {hint}")
    return value


class EnvironmentConfig(Section):
    """Environment of a trial's processes."""

    environment_variables: Annotated[EnvironmentVariables, BeforeValidator(_variables)] = (
        EnvironmentVariables()
    )
    """Lines ``NAME=value``, as one list or as lists under ``cpu`` and ``cuda``."""

    deepspeed: Literal["zerolab"] | None = None
    """``zerolab``: scripts that import deepspeed, also through Hugging Face, get this engine."""

    determined: Literal["zerolab"] | None = None
    """``zerolab``: code that imports determined gets Zerolab's replacement of it."""

    wandb: Literal["zerolab"] | None = None
    """``zerolab``: ``import wandb`` imports ``zerolab.compat.wandb``, and metrics, media and files
    that the script logs become those of the trial."""

    python: Annotated[str, AfterValidator(_python)] | None = None
    """Another interpreter for the ranks, or the directory of a conda or virtual environment, at the
    same path on every machine, with Zerolab in the same version. By default the agent's
    interpreter."""


def _regex(value: str) -> str:
    compile_pattern(value)
    return value


def _action(value: Any) -> Any:
    """Read the old form ``{type: cancel_retries}`` as well."""
    return value["type"] if isinstance(value, dict) and set(value) == {"type"} else value


class LogPolicy(Section):
    """Action for lines of a trial's log that match a pattern."""

    name: Annotated[str, AfterValidator(check_name)] | None = None
    """A label shown with the trial; it replaces a default policy of the same name."""

    pattern: Annotated[str, AfterValidator(_regex)] = ""
    """A regular expression (RE2's syntax); an empty one switches the default policy off."""

    action: Annotated[
        Literal["cancel_retries", "exclude_node"] | None, BeforeValidator(_action)
    ] = None
    """``cancel_retries``: the trial is not restarted; ``exclude_node``: not on that machine."""


class RetentionPolicyConfig(Section):
    """Retention of logs and metrics."""

    log_retention_days: Annotated[int, Field(ge=-1, le=32767)] | None = None
    """Days after the end of a trial until the server deletes its log; -1, or no value: the log is
    kept until the experiment is deleted."""

    metric_retention_days: Annotated[int, Field(ge=0, le=32767)] | None = None
    """Days after the end of the experiment until the server removes values of training and system
    metrics: of each 1,024 steps it keeps the mean, minimum, maximum and last value. Metrics of
    other groups, such as validation, and all values near a checkpoint and the end, are kept. By
    default all are kept."""

    @property
    def days(self) -> int | None:
        """Return the days after the end of a trial; None if its log is kept."""
        days = self.log_retention_days
        return None if days is None or days < 0 else days


class ProfilingConfig(Section):
    """Timings of the training loop, reported as system metrics."""

    enabled: bool = False
    """Time the phases of each batch. CPU, memory and GPU metrics are recorded in any case."""

    begin_on_batch: NonNegativeInt = 0
    """First batch that is timed, counted from 0."""

    end_after_batch: NonNegativeInt | None = None
    """Last batch that is timed; null means the last one of training."""

    sync_timings: bool = True
    """Wait for the GPU before reading the clock."""


class NotifyConfig(Section):
    """Messages about the experiment's events."""

    channels: Annotated[
        list[Annotated[str, AfterValidator(check_channel_name)]], Field(max_length=20)
    ] = Field(default_factory=list)
    """Names of notification channels of the server (``zerolab notify list``)."""

    events: list[EventName] | None = None
    """Events that are sent to these channels; by default those of each channel."""

    waiting_after: Annotated[float, Field(ge=60, allow_inf_nan=False)] = 3600.0
    """Seconds that the experiment waits for slots until the event ``waiting``."""

    stalled_after: Annotated[float, Field(ge=60, allow_inf_nan=False)] = 1800.0
    """Seconds that a run reports nothing until the event ``stalled``."""
