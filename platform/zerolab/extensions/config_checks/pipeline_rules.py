"""Rules between keys for pipeline stages.

They are checked when a file with ``pipeline.stages`` is read, and when an engine is built. Without
``pipeline.stages`` only the model has the number of stages.
"""

from collections.abc import Iterator

from zerolab.config.engine.engine_config import EngineConfig
from zerolab.config.engine.parallel import ScheduleName

__all__ = ["pipeline_checks", "schedule_problems", "unmanaged_problem"]


def pipeline_checks(config: EngineConfig, stages: int) -> Iterator[tuple[list[str], str]]:
    """Yield the violated rules of models with several stages.

    Args:
        config: The engine's configuration.
        stages: Ranks of a pipeline, more than one.

    Yields:
        The keys that a rule reads, and the problem.
    """
    if unmanaged := unmanaged_problem(config):
        yield ["pipeline.stages", "managed_gradient_accumulation"], unmanaged
    if config.zero_optimization.stage == 3:
        yield (
            ["pipeline.stages", "zero_optimization.stage"],
            f"zero_optimization.stage: must be 0, 1 or 2 with {stages} pipeline stages, got 3: "
            "each micro-batch would gather all weights of its stage again, twice; stages hold a "
            "part of the model already",
        )
    if config.pipeline.schedule == "zero-bubble" and config.compile.enabled:
        yield ["pipeline", "compile.enabled"], _COMPILED


_COMPILED = (
    "compile.enabled: must be false with pipeline.schedule zero-bubble, which splits backward, got "
    "true; use 1f1b or interleaved"
)


def unmanaged_problem(config: EngineConfig) -> str | None:
    """Return the problem of gradient accumulation with a ``PipelineModule``, or None.

    Args:
        config: The engine's configuration.
    """
    if config.managed_gradient_accumulation:
        return None
    return (
        "managed_gradient_accumulation: must be true for a PipelineModule, whose train_batch() "
        "trains a whole batch, got false; remove it"
    )


def schedule_problems(
    name: ScheduleName,
    stages: int,
    micro_batches: int,
    *,
    chunks: int | None = None,
    compiled: bool = False,
) -> list[str]:
    """Return why a schedule cannot run on several stages; empty if it can.

    Args:
        name: Name of the schedule.
        stages: Ranks of a pipeline.
        micro_batches: Micro-batches of a batch.
        chunks: Chunks on each rank; None if the model is unknown.
        compiled: The model is compiled.
    """
    problems = []
    if name in {"1f1b", "gpipe"} and (chunks or 1) > 1:
        problems.append(
            f"pipeline.schedule: must be interleaved or zero-bubble for a PipelineModule of "
            f"{chunks} chunks a rank, got {name}; or build it with chunks=1"
        )
    if name == "interleaved" and chunks == 1:
        problems.append(
            "pipeline.schedule: interleaved needs several chunks a rank, got 1; build the "
            "PipelineModule with chunks=2"
        )
    if name == "zero-bubble" and compiled:
        problems.append(_COMPILED)
    rounds = max(1, micro_batches // stages)
    if name in {"interleaved", "zero-bubble"} and micro_batches % rounds:
        problems.append(
            f"gradient_accumulation_steps: must be a multiple of {rounds} (accumulation steps // "
            f"pipeline stages) for {name}, got {micro_batches}; a multiple of the {stages} "
            "pipeline stages always is"
        )
    return problems
