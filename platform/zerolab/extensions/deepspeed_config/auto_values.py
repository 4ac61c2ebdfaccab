"""Resolution of values that are ``"auto"``, from hyperparameters and rules.

Hyperparameters come first, then their block ``training_arguments``, under DeepSpeed's name of the
key and under the names of Hugging Face's libraries. Otherwise each key has its rule. A key
without any of these is an error.
"""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from zerolab.config.engine.dialect import ResolvedAuto
from zerolab.config.engine.trial_values import current_trial_values
from zerolab.contract.hparam_reads import note_read
from zerolab.extensions.deepspeed_config.unsupported_keys import UNSUPPORTED_KEYS

__all__ = ["AUTO_SOURCES", "fill_auto"]

_MICRO, _TRAIN = "train_micro_batch_size_per_gpu", "train_batch_size"
_LR, _TOTAL = "optimizer.params.lr", "scheduler.params.total_num_steps"

AUTO_SOURCES: dict[str, tuple[str, ...]] = {
    _TRAIN: ("global_batch_size",),
    _MICRO: ("per_device_train_batch_size", "micro_batch_size"),
    "gradient_clipping": ("max_grad_norm",),
    _LR: ("learning_rate",),
    "optimizer.params.betas": ("adam_betas",),
    "optimizer.params.eps": ("adam_epsilon",),
    "scheduler.params.warmup_num_steps": ("warmup_steps", "warmup_ratio"),
    "scheduler.params.warmup_max_lr": ("learning_rate", "lr"),
    _TOTAL: ("max_steps",),
    "fp16.enabled": ("fp16", "mixed_precision"),
    "bf16.enabled": ("bf16", "mixed_precision"),
    "zero_optimization.stage": ("zero_stage",),
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": ("zero3_save_16bit_model",),
    "zero_optimization.offload_optimizer.device": ("offload_optimizer_device",),
    "zero_optimization.offload_optimizer.nvme_path": ("offload_optimizer_nvme_path",),
    "zero_optimization.offload_param.device": ("offload_param_device",),
}
"""Hyperparameters that fill a key, besides the one with the key's name."""
_TOO_COMMON = frozenset({"enabled", "device", "type", "nvme_path"})
"""Names of keys in many blocks: one hyperparameter would fill all of them."""

_LEFT_OPEN = frozenset(
    {
        _TRAIN,
        _MICRO,
        "gradient_accumulation_steps",
        "steps_per_print",
        "communication_data_type",
        "pipeline.stages",
        "tensor_parallel.plan",
        "zero_optimization.reduce_bucket_size",
        "zero_optimization.allgather_bucket_size",
        "zero_optimization.sub_group_size",
        "zero_optimization.overlap_comm",
        "zero_optimization.offload_optimizer.pin_memory",
        "zero_optimization.offload_param.pin_memory",
    }
)
"""Keys that are dropped if nothing fills them."""
_OPEN_BLOCKS = ("data_types.", "fp16.", "bf16.", "optimizer.params.", "zero_optimization.stage3_")
"""Prefixes of further keys that are dropped if nothing fills them."""
_LAST = ("scheduler.params.warmup_max_lr", "scheduler.params.warmup_num_steps")
"""Keys whose rules depend on other resolved keys."""


@dataclass(frozen=True)
class _ResolvedValue:
    value: Any
    """``None``: the key is left out."""
    origin: str


class _Lookup:
    """Lookup of values in a trial's hyperparameters."""

    def __init__(
        self,
        hyperparameters: Mapping[str, Any],
        batches: int | None = None,
        *,
        of_trial: bool = False,
    ) -> None:
        self._of_trial = of_trial
        inner = hyperparameters.get("training_arguments")
        self._homes = [(hyperparameters, "hyperparameters")]
        if isinstance(inner, Mapping):
            self._homes.append((inner, "hyperparameters.training_arguments"))
        self.batches = batches
        """Maximum length of a trial in optimizer steps."""

    def find(self, *names: str) -> _ResolvedValue | None:
        """Return the first hyperparameter with one of these names that is not null."""
        for name in names:
            for values, path in self._homes:
                if values.get(name) is not None:
                    if self._of_trial:
                        note_read(f"{path}.{name}".removeprefix("hyperparameters."))
                    return _ResolvedValue(values[name], f"{path}.{name}")
        return None


def fill_auto(
    content: Mapping[str, Any],
    hyperparameters: Mapping[str, Any] | None = None,
    batches: int | None = None,
    idle: Collection[str] = (),
) -> ResolvedAuto:
    """Replace each ``"auto"`` by its value.

    Args:
        content: An engine file with canonical keys.
        hyperparameters: A trial's, nested or not; None means those of the trial that this process
            belongs to, if it does.
        batches: Maximum length of the trial in optimizer steps.
        idle: Dotted keys that have no effect here.
    """
    if hyperparameters is not None:
        lookup = _Lookup(hyperparameters, batches)
    elif trial := current_trial_values():
        lookup = _Lookup(trial.hyperparameters, trial.batches, of_trial=True)
    else:
        lookup = _Lookup({})
    filling = _AutoResolver(content, lookup, idle)
    for key in sorted(filling.waiting, key=lambda key: key in _LAST):
        filling.fill(key)
    filling.check_batch()
    return ResolvedAuto(filling.content, filling.origins, filling.problems, frozenset(filling.bad))


class _AutoResolver:
    """State of the replacement of ``"auto"`` values in a file."""

    def __init__(self, content: Mapping[str, Any], lookup: _Lookup, idle: Collection[str]) -> None:
        self.lookup = lookup
        self.waiting: list[str] = []
        self.content = self._without_autos(content, "")
        self.origins: dict[str, str] = {}
        self.problems: list[str] = []
        self.bad: set[str] = set()
        self._idle = idle

    def _without_autos(self, block: Mapping[str, Any], prefix: str) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for name, value in block.items():
            key = f"{prefix}{name}"
            if value == "auto" and key in ("fp16", "bf16"):
                result[name] = self._without_autos({"enabled": "auto"}, f"{key}.")
            elif isinstance(value, Mapping):
                result[name] = self._without_autos(value, f"{key}.")
            elif value == "auto":
                self.waiting.append(key)
            else:
                result[name] = value
        return result

    def value(self, key: str) -> Any:
        """Return the resolved value of a key, or None."""
        value: Any = self.content
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return value

    def fill(self, key: str) -> None:
        """Replace a key's ``"auto"``, or record that nothing determines it."""
        answer = self._resolve(key)
        if answer is None:
            self.refuse(key, key)
            return
        self.origins[key] = answer.origin
        if answer.value is not None:
            home = self.content
            *blocks, name = key.split(".")
            for block in blocks:
                home = home[block]
            home[name] = answer.value

    def _resolve(self, key: str) -> _ResolvedValue | None:
        blocks = key.split(".")
        if any(".".join(blocks[: count + 1]) in UNSUPPORTED_KEYS for count in range(len(blocks))):
            return _ResolvedValue(None, "does not exist here, and is off")
        if key in _RULES:
            return _RULES[key](self)
        match = self.lookup.find(*_names(key))
        if match is not None:
            return match
        if key == _LR or not (key in self._idle or _is_open(key)):
            return None
        return _ResolvedValue(None, "as if absent")

    def refuse(self, key: str, *bad: str) -> None:
        """Record that nothing determines a key."""
        alternatives = " or ".join(f"hyperparameters.{name}" for name in _names(key))
        if key == _TOTAL:
            alternatives += " or searcher.max_length in batches"
        more = f", or set {alternatives}" if alternatives else ""
        self.problems.append(
            f"{key}: must be a value, got 'auto', which nothing determines; give one{more}"
        )
        self.bad.update(bad)

    def check_batch(self) -> None:
        """Require one of two sizes, from which the others follow; report both at once."""
        open_sizes = [key for key in (_MICRO, _TRAIN) if key in self.waiting]
        if open_sizes and self.value(_MICRO) is None and self.value(_TRAIN) is None:
            self.refuse(open_sizes[0], _MICRO, _TRAIN, "gradient_accumulation_steps")


def _names(key: str) -> tuple[str, ...]:
    """Return the hyperparameters that fill a key."""
    name = key.rpartition(".")[2]
    return (*(() if name in _TOO_COMMON else (name,)), *AUTO_SOURCES.get(key, ()))


def _is_open(key: str) -> bool:
    return key in _LEFT_OPEN or key.startswith(_OPEN_BLOCKS)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _clipping(filling: _AutoResolver) -> _ResolvedValue:
    match = filling.lookup.find(*_names("gradient_clipping"))
    return match or _ResolvedValue(1.0, "the default, 1.0")


def _precision(filling: _AutoResolver, kind: str) -> _ResolvedValue | None:
    explicit, mixed = filling.lookup.find(kind), filling.lookup.find("mixed_precision")
    if explicit is not None and explicit.value is not False:
        return explicit
    if mixed is None:
        return explicit or _ResolvedValue(value=False, origin="the default, off")
    word = "no" if mixed.value is False else mixed.value  # YAML reads a bare no as false
    if word not in ("no", "fp32", "fp16", "bf16"):
        problem = f"{mixed.origin}: must be no, fp16 or bf16, got {mixed.value!r}"
        filling.problems += [] if problem in filling.problems else [problem]
        filling.bad.update(("fp16.enabled", "bf16.enabled"))
    return _ResolvedValue(word == kind, mixed.origin)


def _betas(filling: _AutoResolver) -> _ResolvedValue:
    match = filling.lookup.find(*_names("optimizer.params.betas"))
    first, second = filling.lookup.find("adam_beta1"), filling.lookup.find("adam_beta2")
    if match or not (first or second):
        return match or _ResolvedValue(None, "as if absent")
    pair = [first.value if first else 0.9, second.value if second else 0.999]
    return _ResolvedValue(pair, " and ".join(beta.origin for beta in (first, second) if beta))


def _highest_rate(filling: _AutoResolver) -> _ResolvedValue | None:
    explicit, rate = filling.lookup.find("warmup_max_lr"), filling.value(_LR)
    if explicit is None and rate is not None:
        return _ResolvedValue(rate, _LR)
    return explicit or filling.lookup.find("learning_rate", "lr")


def _total(filling: _AutoResolver) -> _ResolvedValue | None:
    explicit, max_steps = filling.lookup.find("total_num_steps"), filling.lookup.find("max_steps")
    if explicit is None and filling.lookup.batches:
        return _ResolvedValue(filling.lookup.batches, "searcher.max_length")
    if max_steps is not None and _is_number(max_steps.value) and max_steps.value <= 0:
        max_steps = None  # -1 leaves it to the epochs
    return explicit or max_steps


def _warmup(filling: _AutoResolver) -> _ResolvedValue | None:
    lookup = filling.lookup
    steps, ratio = lookup.find("warmup_num_steps", "warmup_steps"), lookup.find("warmup_ratio")
    specified = [setting for setting in (steps, ratio) if setting is not None]
    for setting in specified:
        if not _is_number(setting.value) or setting.value >= 1 or setting.value < 0:
            return setting  # unchanged: the schedule checks it
        if setting.value > 0:  # a share of all steps
            total = filling.value(_TOTAL)
            total_steps = _ResolvedValue(total, _TOTAL) if total is not None else _total(filling)
            if total_steps is None or not _is_number(total_steps.value):
                return None
            count = max(1, math.ceil(setting.value * total_steps.value))
            return _ResolvedValue(count, f"{setting.origin} x {total_steps.origin}")
    return _ResolvedValue(1, f"{specified[0].origin}, at least 1") if specified else None


def _lowest_rate(filling: _AutoResolver) -> _ResolvedValue:
    return filling.lookup.find("warmup_min_lr") or _ResolvedValue(0.0, "the default, 0")


_RULES: dict[str, Callable[[_AutoResolver], _ResolvedValue | None]] = {
    "gradient_clipping": _clipping,
    "fp16.enabled": lambda filling: _precision(filling, "fp16"),
    "bf16.enabled": lambda filling: _precision(filling, "bf16"),
    "optimizer.params.betas": _betas,
    "scheduler.params.warmup_min_lr": _lowest_rate,
    "scheduler.params.warmup_max_lr": _highest_rate,
    "scheduler.params.warmup_num_steps": _warmup,
    _TOTAL: _total,
}
"""Keys with a rule."""
