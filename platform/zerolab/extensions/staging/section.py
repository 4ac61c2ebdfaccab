"""The key ``stage`` of the block ``data`` of an experiment file."""

from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from zerolab.contract.spec import StageSpec
from zerolab.schema.section import Section, drop_nulls, validate

__all__ = ["StageConfig", "stage_problems", "stage_spec"]


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


def stage_spec(block: Mapping[str, Any]) -> StageSpec:
    """Return a valid block in the form for a run."""
    stage = StageConfig.model_validate(drop_nulls(block, frozenset()))
    return StageSpec(stage.source, stage.to, stage.once_per == "trial")


def stage_problems(block: object) -> Iterator[str]:
    """Yield the problems of a block."""
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
            yield f"data.stage.to: must be outside of data.stage.from, got {stage.to!r}"
