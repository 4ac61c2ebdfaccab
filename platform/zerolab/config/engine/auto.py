"""Values that say ``"auto"``: taken from the hyperparameters, or refused by name."""

from collections.abc import Mapping
from typing import Any

__all__ = ["AUTO_SOURCES", "fill_auto"]

AUTO_SOURCES: dict[str, tuple[str, ...]] = {
    "train_batch_size": ("global_batch_size",),
    "train_micro_batch_size_per_gpu": ("per_device_train_batch_size",),
    "gradient_clipping": ("max_grad_norm",),
    "optimizer.params.lr": ("learning_rate",),
    "optimizer.params.betas": ("adam_betas",),
    "optimizer.params.eps": ("adam_epsilon",),
    "scheduler.params.warmup_max_lr": ("learning_rate", "lr"),
    "scheduler.params.total_num_steps": ("max_steps",),
    "scheduler.params.warmup_num_steps": ("warmup_steps",),
    "fp16.enabled": ("fp16",),
    "bf16.enabled": ("bf16",),
}
"""Hyperparameters that fill a key beside the one that has the key's own name."""

_TOO_COMMON = frozenset({"enabled", "device"})
"""Names that stand in many blocks: a hyperparameter of that name would fill all of them alike."""


def fill_auto(
    content: Mapping[str, Any], hyperparameters: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """Replace each ``"auto"`` by the hyperparameter of that name.

    Args:
        content: An engine file.
        hyperparameters: A trial's, nested or not; only its top level is looked at.

    Returns:
        The file with values in place, and one problem for each key that found none. Such keys
        are left out, so that what else is wrong can still be told.
    """
    problems: list[str] = []
    return _fill(content, hyperparameters, "", problems), problems


def _fill(
    data: Mapping[str, Any], hyperparameters: Mapping[str, Any], prefix: str, problems: list[str]
) -> dict[str, Any]:
    filled: dict[str, Any] = {}
    for name, value in data.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping):
            filled[name] = _fill(value, hyperparameters, f"{key}.", problems)
        elif value != "auto":
            filled[name] = value
        else:
            own = () if name in _TOO_COMMON else (name,)
            sources = own + AUTO_SOURCES.get(key, ())
            found = next((source for source in sources if source in hyperparameters), None)
            if found is not None:
                filled[name] = hyperparameters[found]
                continue
            wanted = " or ".join(f"hyperparameters.{source}" for source in sources)
            more = f", or set {wanted}" if wanted else ""
            problems.append(f"{key}: must be a value, got 'auto'; give one{more}")
    return filled
