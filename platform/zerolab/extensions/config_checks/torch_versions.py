"""The oldest torch that each part of the engine runs on."""

import re

from zerolab.config.engine.engine_config import EngineConfig

__all__ = ["OLDEST_TORCH", "torch_problems"]

OLDEST_TORCH = (2, 6)
"""For ZeRO stages 0 to 2."""

_RELEASE = re.compile(r"(\d+)\.(\d+)")


def torch_problems(
    config: EngineConfig, version: str, pipeline_stages: int | None = None
) -> list[str]:
    """Return why a torch is too old for an engine configuration.

    Args:
        config: Of the engine.
        version: Of torch, e.g. ``2.7.1+cu126``.
        pipeline_stages: Stages of the model, if known; by default those of the configuration.

    Returns:
        One problem for each key that needs a newer torch; empty if there is none.

    Example:
        >>> from zerolab.config import load_engine_config
        >>> config = load_engine_config({"train_batch_size": 8, "zero_optimization": {"stage": 3}})
        >>> torch_problems(config, "2.6.0")[0].split(";")[0]
        'zero_optimization.stage: 3 needs torch 2.7 or newer, got torch 2.6.0'
    """
    release = _RELEASE.match(version)
    if release is None:
        return [f"torch: must be a version such as 2.11.0, got {version!r}"]
    release_numbers = (int(release[1]), int(release[2]))
    zero, optimizer = config.zero_optimization, config.optimizer
    stages = pipeline_stages or config.pipeline.stages or 1
    cut = config.tensor_parallel.size
    is_muon = optimizer is not None and optimizer.type.lower() == "muon"
    needs = [
        ((2, 7), zero.stage == 3, f"zero_optimization.stage: {zero.stage}", "use stage 0, 1 or 2"),
        ((2, 7), stages > 1, f"pipeline.stages: {stages}", "set it to 1"),
        ((2, 7), cut > 1, f"tensor_parallel.size: {cut}", "set it to 1"),
        ((2, 9), is_muon, "optimizer.type: Muon", "use AdamW"),
    ]
    problems = []
    if release_numbers < OLDEST_TORCH:
        problems.append(f"torch: must be 2.6 or newer, got {version}; install a newer torch")
    return problems + [
        f"{key} needs torch {oldest[0]}.{oldest[1]} or newer, got torch {version}; "
        f"install a newer torch, or {remedy}"
        for oldest, applies, key, remedy in needs
        if applies and release_numbers < oldest
    ]
