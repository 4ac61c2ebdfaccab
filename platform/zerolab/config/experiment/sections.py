"""The blocks of an experiment file."""

import re
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from zerolab.config.experiment.patterns import compile_pattern
from zerolab.contract.names import check_name
from zerolab.contract.secret_text import MASK, is_secret_name
from zerolab.contract.spec import ENV_COLLECTIVE_TIMEOUT
from zerolab.registry import Registry
from zerolab.schema.section import (
    NonNegativeInt,
    Section,
    drop_nulls,
    validate,
)

__all__ = [
    "EnvironmentConfig",
    "LogPolicy",
    "ProfilingConfig",
    "ReproducibilityConfig",
    "RetentionPolicyConfig",
    "StageConfig",
    "stage_of",
    "stage_problems",
]


def _source(value: str) -> str:
    if "://" not in value and not value.startswith("/"):
        raise ValueError(f"must be an absolute path or a URL such as s3://bucket/x, got {value!r}")
    return value


def _target(value: str) -> str:
    if not value.startswith("/") or not value.strip("/"):
        raise ValueError(f"must be the absolute path of a directory, got {value!r}")
    return value


class StageConfig(Section):
    """Data that is copied to a directory of the node before the ranks of a trial start."""

    source: Annotated[str, AfterValidator(_source)] = Field(alias="from")
    """Source: the absolute path of a folder or a file, or a URL that fsspec reads, e.g.
    ``s3://bucket/folder``, with the credentials of the machine."""

    to: Annotated[str, AfterValidator(_target)]
    """Directory of the copy on each machine of the trial; a file keeps its name in it. It must not
    exist yet, or be an earlier copy."""

    once_per: Literal["node", "trial"] = "node"
    """``node``: all trials of a machine share one copy, which is kept. ``trial``: each run has a
    copy in ``to/trial-ID``, which is removed when the run ends."""


def stage_of(data: Mapping[str, Any]) -> StageConfig | None:
    """Return the key ``stage`` of a valid block ``data``."""
    block = data.get("stage")
    return None if block is None else StageConfig.model_validate(drop_nulls(block, frozenset()))


def stage_problems(data: Mapping[str, Any]) -> Iterator[str]:
    """Yield the problems of the key ``stage`` of a block ``data``."""
    block = data.get("stage")
    if block is None:
        return
    if problem := Registry[object]("zerolab.run_hooks", {}).problem("stage"):
        yield f"data.stage: {problem}"
    if not isinstance(block, Mapping):
        yield (
            "data.stage: must be a mapping {from, to, once_per} of data to copy to the machine, "
            f"got {block!r}; give a value of your own another name"
        )
        return
    stage, problems, _ = validate(StageConfig, drop_nulls(block, frozenset()))
    yield from (f"data.stage.{problem}" for problem in problems)
    if stage is not None and not problems:
        source, to = (PurePosixPath(text) for text in (stage.source, stage.to))
        if source.is_relative_to(to) or to.is_relative_to(source):
            yield f"data.stage.to: must lie apart from data.stage.from, got {stage.to!r}"


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
        raise ValueError(text + "ROCm's GPUs are no slots here: remove it")
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
    """Retention of logs."""

    log_retention_days: Annotated[int, Field(ge=-1, le=32767)] | None = None
    """Days after the end of a trial until the server deletes its log; -1, or no value: the log is
    kept until the experiment is deleted."""

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
