"""Values that say ``"auto"``: what determines each one, and which are refused since nothing does.

Hyperparameters are looked at first, then their block ``training_arguments``, under DeepSpeed's own
name of the key and under the names that Hugging Face's libraries use. Then each key has its rule.
"""

import contextlib
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from zerolab.config.engine.unsupported_keys import REFUSED
from zerolab.contract.hparam_reads import note_read

__all__ = ["AUTO_SOURCES", "Filled", "determined_by", "fill_auto"]

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
"""Hyperparameters that fill a key beside the one that has the key's own name."""

_TOO_COMMON = frozenset({"enabled", "device", "type", "nvme_path"})
"""Names that stand in many blocks: a hyperparameter of that name would fill all of them alike."""

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
"""Keys that stand as if absent where nothing fills them."""

_OPEN_BLOCKS = ("data_types.", "fp16.", "bf16.", "optimizer.params.", "zero_optimization.stage3_")
"""What all keys begin with of which the same is true."""

_LAST = ("scheduler.params.warmup_max_lr", "scheduler.params.warmup_num_steps")
"""Keys whose rules look at what others have come to."""


@dataclass(frozen=True)
class Filled:
    """An engine file in which nothing says ``"auto"`` any more."""

    content: dict[str, Any]
    origins: dict[str, str]
    """Of each key that said it: what determined it."""
    problems: list[str]
    """One line for each key that nothing determines. Such keys are left out."""
    bad: frozenset[str]
    """Those keys, and what depends on them."""


@dataclass(frozen=True)
class _Answer:
    value: Any
    """``None``: the key is left out."""
    origin: str


class _Known:
    """What values are looked up in."""

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
        """How far the searcher lets a trial train, in optimizer steps."""

    def find(self, *names: str) -> _Answer | None:
        """The first hyperparameter of these names that is not null."""
        for name in names:
            for home, place in self._homes:
                if home.get(name) is not None:
                    if self._of_trial:
                        note_read(f"{place}.{name}".removeprefix("hyperparameters."))
                    return _Answer(home[name], f"{place}.{name}")
        return None


_of_this_process: list[_Known] = []


@contextlib.contextmanager
def determined_by(hyperparameters: Mapping[str, Any], batches: int | None = None) -> Iterator[None]:
    """Have engine files that are read in this process find a trial's hyperparameters.

    Args:
        hyperparameters: Of the trial.
        batches: How far the searcher lets it train, in optimizer steps.
    """
    known = _Known(hyperparameters, batches, of_trial=True)
    _of_this_process.append(known)
    try:
        yield
    finally:
        _of_this_process[:] = [each for each in _of_this_process if each is not known]


def fill_auto(
    content: Mapping[str, Any],
    hyperparameters: Mapping[str, Any] | None = None,
    batches: int | None = None,
    idle: Collection[str] = (),
) -> Filled:
    """Replace each ``"auto"`` by what determines it.

    Args:
        content: An engine file, its keys under their first names.
        hyperparameters: A trial's, nested or not; None means those of the trial that this process
            belongs to (:func:`determined_by`), if it does.
        batches: How far the searcher lets the trial train, in optimizer steps.
        idle: Dotted keys that have no effect here.
    """
    if hyperparameters is not None:
        known = _Known(hyperparameters, batches)
    else:
        known = _of_this_process[-1] if _of_this_process else _Known({})
    filling = _Filling(content, known, idle)
    for key in sorted(filling.waiting, key=lambda key: key in _LAST):
        filling.fill(key)
    filling.check_batch()
    return Filled(filling.content, filling.origins, filling.problems, frozenset(filling.bad))


class _Filling:
    """A file that is being filled."""

    def __init__(self, content: Mapping[str, Any], known: _Known, idle: Collection[str]) -> None:
        self.known = known
        self.waiting: list[str] = []
        self.content = self._without_autos(content, "")
        self.origins: dict[str, str] = {}
        self.problems: list[str] = []
        self.bad: set[str] = set()
        self._idle = idle

    def _without_autos(self, block: Mapping[str, Any], prefix: str) -> dict[str, Any]:
        rest: dict[str, Any] = {}
        for name, value in block.items():
            key = f"{prefix}{name}"
            if value == "auto" and key in ("fp16", "bf16"):
                rest[name] = self._without_autos({"enabled": "auto"}, f"{key}.")
            elif isinstance(value, Mapping):
                rest[name] = self._without_autos(value, f"{key}.")
            elif value == "auto":
                self.waiting.append(key)
            else:
                rest[name] = value
        return rest

    def value(self, key: str) -> Any:
        """What a key has come to; None when it is absent."""
        found: Any = self.content
        for part in key.split("."):
            found = found.get(part) if isinstance(found, Mapping) else None
        return found

    def fill(self, key: str) -> None:
        """Put what determines a key into its place, or name the key."""
        answer = self._answer(key)
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

    def _answer(self, key: str) -> _Answer | None:
        blocks = key.split(".")
        if any(".".join(blocks[: count + 1]) in REFUSED for count in range(len(blocks))):
            return _Answer(None, "does not exist here, and is off")
        if key in _RULES:
            return _RULES[key](self)
        found = self.known.find(*_names(key))
        if found is not None:
            return found
        if key == _LR or not (key in self._idle or _is_open(key)):
            return None
        return _Answer(None, "as if absent")

    def refuse(self, key: str, *bad: str) -> None:
        """Say that nothing determines a key."""
        wanted = " or ".join(f"hyperparameters.{name}" for name in _names(key))
        if key == _TOTAL:
            wanted += " or searcher.max_length in batches"
        more = f", or set {wanted}" if wanted else ""
        self.problems.append(
            f"{key}: must be a value, got 'auto', which nothing determines; give one{more}"
        )
        self.bad.update(bad)

    def check_batch(self) -> None:
        """One of two sizes must be known for the others to be derived; said once for both."""
        said = [key for key in (_MICRO, _TRAIN) if key in self.waiting]
        if said and self.value(_MICRO) is None and self.value(_TRAIN) is None:
            self.refuse(said[0], _MICRO, _TRAIN, "gradient_accumulation_steps")


def _names(key: str) -> tuple[str, ...]:
    """The hyperparameters that fill a key."""
    name = key.rpartition(".")[2]
    return (*(() if name in _TOO_COMMON else (name,)), *AUTO_SOURCES.get(key, ()))


def _is_open(key: str) -> bool:
    return key in _LEFT_OPEN or key.startswith(_OPEN_BLOCKS)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _clipping(filling: _Filling) -> _Answer:
    found = filling.known.find(*_names("gradient_clipping"))
    return found or _Answer(1.0, "1.0 where nothing says otherwise")


def _precision(filling: _Filling, kind: str) -> _Answer | None:
    own, mixed = filling.known.find(kind), filling.known.find("mixed_precision")
    if own is not None and own.value is not False:
        return own
    if mixed is None:
        return own or _Answer(value=False, origin="off where nothing says otherwise")
    word = "no" if mixed.value is False else mixed.value  # YAML reads a bare no as false
    if word not in ("no", "fp32", "fp16", "bf16"):
        problem = f"{mixed.origin}: must be no, fp16 or bf16, got {mixed.value!r}"
        filling.problems += [] if problem in filling.problems else [problem]
        filling.bad.update(("fp16.enabled", "bf16.enabled"))
    return _Answer(word == kind, mixed.origin)


def _betas(filling: _Filling) -> _Answer:
    found = filling.known.find(*_names("optimizer.params.betas"))
    first, second = filling.known.find("adam_beta1"), filling.known.find("adam_beta2")
    if found or not (first or second):
        return found or _Answer(None, "as if absent")
    pair = [first.value if first else 0.9, second.value if second else 0.999]
    return _Answer(pair, " and ".join(each.origin for each in (first, second) if each))


def _highest_rate(filling: _Filling) -> _Answer | None:
    own, rate = filling.known.find("warmup_max_lr"), filling.value(_LR)
    if own is None and rate is not None:
        return _Answer(rate, _LR)
    return own or filling.known.find("learning_rate", "lr")


def _total(filling: _Filling) -> _Answer | None:
    own, most = filling.known.find("total_num_steps"), filling.known.find("max_steps")
    if own is None and filling.known.batches:
        return _Answer(filling.known.batches, "searcher.max_length")
    if most is not None and _is_number(most.value) and most.value <= 0:
        most = None  # -1 leaves it to the epochs
    return own or most


def _warmup(filling: _Filling) -> _Answer | None:
    known = filling.known
    steps, ratio = known.find("warmup_num_steps", "warmup_steps"), known.find("warmup_ratio")
    given = [each for each in (steps, ratio) if each is not None]
    for each in given:
        if not _is_number(each.value) or each.value >= 1 or each.value < 0:
            return each  # as it is, for the schedule's own rules
        if each.value > 0:  # a share of all steps
            total = filling.value(_TOTAL)
            found = _Answer(total, _TOTAL) if total is not None else _total(filling)
            if found is None or not _is_number(found.value):
                return None
            count = max(1, math.ceil(each.value * found.value))
            return _Answer(count, f"{each.origin} x {found.origin}")
    return _Answer(1, f"{given[0].origin}, at least 1") if given else None


def _lowest_rate(filling: _Filling) -> _Answer:
    return filling.known.find("warmup_min_lr") or _Answer(0.0, "0 where nothing says otherwise")


_RULES: dict[str, Callable[[_Filling], _Answer | None]] = {
    "gradient_clipping": _clipping,
    "fp16.enabled": lambda filling: _precision(filling, "fp16"),
    "bf16.enabled": lambda filling: _precision(filling, "bf16"),
    "optimizer.params.betas": _betas,
    "scheduler.params.warmup_min_lr": _lowest_rate,
    "scheduler.params.warmup_max_lr": _highest_rate,
    "scheduler.params.warmup_num_steps": _warmup,
    _TOTAL: _total,
}
"""Keys with a rule of their own."""
