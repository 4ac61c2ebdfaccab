"""Base class of the schedules: a counter, checked arguments, and setting of the rates."""

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
"""One value for all parameter groups, or one per group."""


class LRSchedule:
    """Base class of schedules, which set the rate of each parameter group.

    ``last_batch_iteration`` is -1 at first. Each :meth:`step`, one per applied optimizer step,
    increments it and sets the rates. A schedule's arguments are the fields of its :attr:`section`,
    in their order, by position or by name.

    Args:
        optimizer: Optimizer whose ``param_groups`` get the rates.
        values: Values of the section's first fields.
        named: Values of other fields.

    Raises:
        ConfigError: With one line per invalid argument.
        TypeError: For unknown or missing arguments.

    Example:
        >>> from zerolab.schema.section import PositiveInt, Section
        >>> from zerotrial.engine.lr_schedules import LRSchedule
        >>> class HalvingParams(Section):
        ...     halve_every: PositiveInt = 1000
        >>> class HalvingLR(LRSchedule):
        ...     section = HalvingParams
        ...     def prepare(self):
        ...         self.base = self.get_last_lr()
        ...     def rates(self, it):
        ...         return [rate / 2 ** ((it + 1) // self.given.halve_every) for rate in self.base]
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
        >>> schedule = HalvingLR(optimizer, halve_every=1)
        >>> schedule.step()
        >>> schedule.get_last_lr()
        [0.05]
    """

    section: ClassVar[type[Section]]
    """Arguments and their rules, which also apply to a file's ``scheduler.params``."""

    given: Section
    """The arguments of this schedule."""

    last_batch_iteration: int
    """Current count; -1 at the start."""

    def __init_subclass__(cls, **options: Any) -> None:
        """Set the signature from the section's fields, for ``help()`` and ``inspect``."""
        super().__init_subclass__(**options)
        if "section" in vars(cls):
            cls.__signature__ = _signature_of(cls.section)  # type: ignore[attr-defined]

    def __init__(self, optimizer: torch.optim.Optimizer, *values: Any, **named: Any) -> None:
        arguments = inspect.signature(type(self)).bind(optimizer, *values, **named).arguments
        self.optimizer = arguments.pop("optimizer")
        self.given = self._read(arguments)
        self.last_batch_iteration = getattr(self.given, "last_batch_iteration", -1)
        self.prepare()

    @classmethod
    def _read(cls, arguments: Mapping[str, Any]) -> Section:
        """Validate arguments by the rules of the engine config."""
        plain = {k: list(v) if isinstance(v, tuple) else v for k, v in arguments.items()}
        section, problems, _ = validate(cls.section, plain)
        if problems or section is None:
            raise ConfigError(f"{cls.__name__}()", problems)
        return section

    def prepare(self) -> None:
        """Prepare the schedule and set the first rates; the arguments are validated."""

    def rates(self, it: int) -> list[float]:
        """Return the learning rate of each parameter group.

        Args:
            it: Count of :meth:`step`, from 0 for the first one.

        Returns:
            One rate per group.

        Raises:
            NotImplementedError: If a subclass does not define it.
        """
        raise NotImplementedError

    def get_lr(self) -> list[float]:
        """Return the rates at the current count.

        Returns:
            One rate per parameter group.
        """
        return self.rates(self.last_batch_iteration)

    def get_last_lr(self) -> list[float]:
        """Return the rates that were set last.

        Returns:
            One rate per parameter group.
        """
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Advance to the next optimizer step and set the rates.

        Args:
            last_batch_iteration: Count to set; None increments it.
        """
        if last_batch_iteration is None:
            last_batch_iteration = self.last_batch_iteration + 1
        self.last_batch_iteration = last_batch_iteration
        self._write(last_batch_iteration)

    def _write(self, it: int) -> None:
        set_rates(self.optimizer, self.rates(it))

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint.

        Returns:
            ``last_batch_iteration`` (int), and further keys of a subclass.
        """
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the result of :meth:`state_dict`; the optimizer keeps its rates.

        Args:
            state: The saved state.
        """
        self.last_batch_iteration = int(state["last_batch_iteration"])


def _signature_of(section: type[Section]) -> Signature:
    arguments = [Parameter("optimizer", Parameter.POSITIONAL_OR_KEYWORD)]
    for name, field in section.model_fields.items():
        default = Parameter.empty if field.is_required() else field.default
        kind = Parameter.POSITIONAL_OR_KEYWORD
        arguments.append(Parameter(name, kind, default=default, annotation=field.annotation))
    return Signature(arguments)


def required_arguments(schedule: Any) -> frozenset[str]:
    """Return the required arguments of a schedule's ``step``.

    Args:
        schedule: Any schedule; ``ReduceLROnPlateau`` needs ``metrics``.
    """
    return _required_arguments(cast("Hashable", type(schedule)))


@functools.cache
def _required_arguments(schedule: Any) -> frozenset[str]:
    kinds = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
    try:
        _, *parameters = inspect.signature(schedule.step).parameters.values()
    except (AttributeError, TypeError, ValueError):  # not a Python function
        return frozenset()
    return frozenset(p.name for p in parameters if p.kind in kinds and p.default is Parameter.empty)


def set_rates(optimizer: torch.optim.Optimizer, rates: Sequence[float]) -> None:
    """Set the learning rate of each parameter group.

    A rate that is a tensor is filled in place: a compiled or captured step keeps reading it.

    Args:
        optimizer: Optimizer whose ``param_groups`` are changed.
        rates: One rate per group.
    """
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def for_groups(name: str, value: Rates, groups: int) -> list[float]:
    """Return one value per parameter group.

    Args:
        name: Name of the argument, for errors.
        value: One value, or one per group.
        groups: Number of the optimizer's groups.

    Returns:
        A list with one value per group.

    Raises:
        ConfigError: If the number of values is wrong.
    """
    if isinstance(value, int | float):
        return [float(value)] * groups
    if len(value) != groups:
        msg = f"scheduler.params.{name}: must have one value for each of {groups} parameter groups"
        raise ConfigError("engine config", [f"{msg}, got {len(value)}"])
    return [float(item) for item in value]
