"""What all schedules have in common: a counter, checked arguments, and how a rate is set."""

import functools
import inspect
from collections.abc import Hashable, Mapping, Sequence
from inspect import Parameter, Signature
from typing import Any, ClassVar, cast

import torch

from zerolab.errors import ConfigError
from zerolab.schema.section import Section, validate

__all__ = ["LRSchedule", "Rates", "for_groups", "required_arguments", "set_rates"]

Rates = float | Sequence[float]
"""One value for all parameter groups, or one for each."""


class LRSchedule:
    """Base of the schedules: a counter, and a rate for each parameter group at that count.

    ``it`` is -1 when a schedule is made; each :meth:`step`, one for each applied optimizer step,
    makes it ``it + 1`` and sets the rates. A schedule's arguments are the fields of its
    :attr:`section`, in their order, by position or by name.

    Args:
        optimizer: Whose ``param_groups`` get the rates.
        values: Of the section's first fields.
        named: Of others.

    Raises:
        ConfigError: With one line for each argument that breaks a rule.
        TypeError: For arguments that are not there, or are missing.
    """

    section: ClassVar[type[Section]]
    """Its arguments and their rules, which a file's ``scheduler.params`` must keep as well."""

    given: Section
    """The arguments."""

    last_batch_iteration: int
    """Where it is; -1 is the beginning."""

    def __init_subclass__(cls, **options: Any) -> None:
        """Show the arguments to ``help()``, and to all who ask for the signature."""
        super().__init_subclass__(**options)
        if "section" in vars(cls):
            cls.__signature__ = _signature_of(cls.section)  # type: ignore[attr-defined]

    def __init__(self, optimizer: torch.optim.Optimizer, *values: Any, **named: Any) -> None:
        given = inspect.signature(type(self)).bind(optimizer, *values, **named).arguments
        self.optimizer = given.pop("optimizer")
        self.given = self._read(given)
        self.last_batch_iteration = getattr(self.given, "last_batch_iteration", -1)
        self.prepare()

    @classmethod
    def _read(cls, given: Mapping[str, Any]) -> Section:
        """Read arguments by the rules of the engine file."""
        plain = {k: list(v) if isinstance(v, tuple) else v for k, v in given.items()}
        read, problems, _ = validate(cls.section, plain)
        if problems or read is None:
            raise ConfigError(f"{cls.__name__}()", problems)
        return read

    def prepare(self) -> None:
        """Make ready, when :attr:`optimizer` and :attr:`given` are there; sets the first rates."""

    def rates(self, it: int) -> list[float]:
        """Learning rate of each group after ``step()`` number ``it + 1``."""
        raise NotImplementedError

    def get_lr(self) -> list[float]:
        """Rates at the present count."""
        return self.rates(self.last_batch_iteration)

    def get_last_lr(self) -> list[float]:
        """Rates that were set last."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Move to the next optimizer step, or to a given one, and set the rates."""
        if last_batch_iteration is None:
            last_batch_iteration = self.last_batch_iteration + 1
        self.last_batch_iteration = last_batch_iteration
        self._write(last_batch_iteration)

    def _write(self, it: int) -> None:
        set_rates(self.optimizer, self.rates(it))

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where :meth:`state_dict` was taken; the rates are the optimizer's."""
        self.last_batch_iteration = int(state["last_batch_iteration"])


def _signature_of(section: type[Section]) -> Signature:
    arguments = [Parameter("optimizer", Parameter.POSITIONAL_OR_KEYWORD)]
    for name, field in section.model_fields.items():
        default = Parameter.empty if field.is_required() else field.default
        kind = Parameter.POSITIONAL_OR_KEYWORD
        arguments.append(Parameter(name, kind, default=default, annotation=field.annotation))
    return Signature(arguments)


def required_arguments(schedule: Any) -> frozenset[str]:
    """List the arguments that a schedule's ``step`` cannot do without.

    Args:
        schedule: Any; ``ReduceLROnPlateau`` needs ``metrics``.
    """
    return _required_arguments(cast("Hashable", type(schedule)))


@functools.cache
def _required_arguments(schedule: Any) -> frozenset[str]:
    kinds = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
    try:
        _, *others = inspect.signature(schedule.step).parameters.values()
    except (AttributeError, TypeError, ValueError):  # not a function of Python
        return frozenset()
    return frozenset(p.name for p in others if p.kind in kinds and p.default is Parameter.empty)


def set_rates(optimizer: torch.optim.Optimizer, rates: Sequence[float]) -> None:
    """Set the learning rate of each parameter group.

    A rate that is a tensor stays that tensor and is filled: a step that was compiled or captured
    goes on reading it.

    Args:
        optimizer: Whose ``param_groups`` are changed.
        rates: One for each group.
    """
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def for_groups(name: str, value: Rates, groups: int) -> list[float]:
    """Give every parameter group its value.

    Args:
        name: Of the argument, for the message.
        value: One, or as many as there are groups.
        groups: Of the optimizer.

    Returns:
        As many as there are groups.

    Raises:
        ConfigError: If there are more or fewer.
    """
    if isinstance(value, int | float):
        return [float(value)] * groups
    if len(value) != groups:
        msg = f"scheduler.params.{name}: must have one value for each of {groups} parameter groups"
        raise ConfigError("engine config", [f"{msg}, got {len(value)}"])
    return [float(item) for item in value]
