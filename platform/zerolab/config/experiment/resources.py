"""The block ``resources`` of an experiment file: slots and machines of a trial."""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field

from zerolab.contract.limits import SLOTS
from zerolab.contract.names import DEFAULT_POOL, check_pool
from zerolab.schema.section import Count, NonNegativeInt, PositiveFloat, Section, hint

__all__ = [
    "ElasticConfig",
    "ResourcesConfig",
    "elastic_problems",
    "fewer_slots",
    "resource_problems",
    "with_elastic_counts",
]


def _pool(value: Any) -> Any:
    return DEFAULT_POOL if value == "" else value  # Determined's files write the default so


def _slots(value: Any) -> Any:
    if value == 0 and not isinstance(value, bool):
        raise ValueError("must be at least 1, got 0; set it to 1: without a GPU that is a CPU slot")
    return value


class ElasticConfig(Section):
    """Smaller numbers of slots with which a trial may continue."""

    min_slots: Count
    """Minimum. The batch stays the same: each rank takes more micro-batches, so only numbers of
    ranks that divide it are possible."""

    counts: list[Count] | None = None
    """Possible numbers of slots; derived from the engine file by default."""


class ResourcesConfig(Section):
    """Slots and machines of each trial."""

    slots_per_trial: Annotated[Count, Field(le=SLOTS), BeforeValidator(_slots)] = 1
    """Ranks of a trial, one for each slot: a GPU, or a CPU slot on machines without GPUs."""

    max_slots: Count | None = None
    """Maximum number of slots that all trials of the experiment use at a time."""

    weight: Annotated[PositiveFloat, Field(le=1_000_000)] = 1.0
    """Share of the slots, relative to experiments of the same priority."""

    priority: Annotated[int, Field(ge=1, le=99)] = 42
    """1 to 99; a smaller number is scheduled first."""

    resource_pool: Annotated[str, BeforeValidator(_pool), AfterValidator(check_pool)] = DEFAULT_POOL
    """Resource pool of its trials: the agents that were started with ``--pool`` and this name."""

    queue_time: Count | None = None
    """Seconds after which an experiment that waits for slots, with no trial running, fails with an
    error that names the missing resources."""

    max_nodes: Count = 1
    """Maximum number of machines (agents) of a trial; as few as possible are used. All of them must
    see the checkpoint storage at the same path."""

    slots_per_rank: Count = 1
    """Slots (GPUs) of each process of a command, all on one machine."""

    elastic: ElasticConfig | None = None
    """Let a trial continue with fewer slots if its machine is lost or its slots are in use."""

    hostfile: str | None = None
    """File of the model directory with lines ``HOST slots=N``. Each trial has a rank on each slot
    of these machines, started over ssh by an agent, which uses one of its slots for that. A slot of
    the file belongs to one trial at a time."""

    include: str = ""
    """Use only these of the hostfile: ``worker-1@worker-2:0,1``."""

    exclude: str = ""
    """Use all of the hostfile but these: ``worker-2:0@worker-3:0,1``."""

    ssh_config: str | None = None
    """Configuration for ssh (``ssh -F``): a file of the model directory, or an absolute path on the
    agent's machine."""

    hosts: dict[str, list[NonNegativeInt]] | None = None
    """Machines to their slots; read from the hostfile."""

    is_single_node: bool | None = hint(None, "set max_nodes: 1")
    """All slots of a trial on one machine."""


def resource_problems(resources: ResourcesConfig, *, is_class: bool) -> Iterator[str]:
    """Yield conflicts between fields of the block.

    Args:
        resources: The block.
        is_class: The entrypoint is a trial class, not a command.
    """
    slots, unit = resources.slots_per_trial, resources.slots_per_rank
    if resources.max_slots is not None and resources.max_slots < slots:
        yield (
            f"resources.max_slots: must be at least slots_per_trial = {slots}, "
            f"got {resources.max_slots}"
        )
    if slots % unit:
        yield f"resources.slots_per_rank: must divide slots_per_trial = {slots}, got {unit}"
    elif unit > 1 and is_class:
        yield (
            f"resources.slots_per_rank: must be 1 for a trial class, got {unit}; it has a rank on "
            "each slot, and a command may have one on several"
        )
    yield from elastic_problems(resources)
    yield from _host_problems(resources)


def _host_problems(resources: ResourcesConfig) -> Iterator[str]:
    if resources.hostfile is None:
        for key in ("include", "exclude", "ssh_config", "hosts"):
            if value := getattr(resources, key):
                yield f"resources.{key}: goes with resources.hostfile, got {value!r} without one"
        return
    reason = "a trial with a hostfile has all slots of it that the filters leave"
    if resources.max_nodes > 1:
        yield f"resources.max_nodes: must be left out, got {resources.max_nodes}; {reason}"
    if resources.max_slots is not None:
        yield f"resources.max_slots: must be left out, got {resources.max_slots}; {reason}"
    if resources.slots_per_rank > 1:
        yield f"resources.slots_per_rank: must be 1, got {resources.slots_per_rank}; {reason}"


def elastic_problems(resources: ResourcesConfig) -> Iterator[str]:
    """Yield conflicts of ``elastic`` with the known slots of a trial.

    Args:
        resources: The block; without ``hosts`` the slots of a hostfile are not known yet.
    """
    elastic, slots = resources.elastic, resources.slots_per_trial
    if elastic is None or (resources.hostfile is not None and resources.hosts is None):
        return
    if elastic.min_slots > slots:
        yield (
            f"resources.elastic.min_slots: must be at most slots_per_trial = {slots}, "
            f"got {elastic.min_slots}"
        )
    unfit = [count for count in elastic.counts or () if count > slots]
    if unfit:
        many = ", ".join(map(str, unfit))
        yield f"resources.elastic.counts: must be at most slots_per_trial = {slots}, got {many}"


def fewer_slots(resources: ResourcesConfig) -> list[int]:
    """Return the smaller numbers of slots of an elastic trial, the largest first.

    Args:
        resources: The block; ``elastic.counts`` are the possible numbers, or None for any.
    """
    elastic, slots, unit = resources.elastic, resources.slots_per_trial, resources.slots_per_rank
    if elastic is None:
        return []
    counts = range(unit, slots, unit) if elastic.counts is None else elastic.counts
    fit = {count for count in counts if elastic.min_slots <= count < slots and count % unit == 0}
    return sorted(fit, reverse=True)


def with_elastic_counts(
    resources: ResourcesConfig, fit: Sequence[int] | None
) -> ElasticConfig | None:
    """Fill in the possible numbers of slots.

    Args:
        resources: The block.
        fit: Numbers that keep the engine file's batch; None if any number is possible, or the
            trial's code decides.

    Raises:
        ValueError: If a number in the block is not possible.
    """
    elastic = resources.elastic
    if elastic is None or fit is None:
        return elastic
    by_key = {"min_slots": [elastic.min_slots], "counts": elastic.counts or []}
    for key, counts in by_key.items():
        impossible = [str(count) for count in counts if count not in fit]
        if impossible:
            possible_text = ", ".join(map(str, fit))
            raise ValueError(
                f"resources.elastic.{key}: must be a number of ranks over which the batch of "
                f"{resources.slots_per_trial} can be divided, one of {possible_text}, "
                f"got {', '.join(impossible)}"
            )
    return elastic.model_copy(update={"counts": elastic.counts or list(fit)})
