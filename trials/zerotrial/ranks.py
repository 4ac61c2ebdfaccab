"""Exchange of small Python values between the ranks of a trial.

Every exchange has a name. When a rank does not answer within the timeout, or dies, the others
raise :class:`CollectiveError` with their rank, the name of the exchange and how long they waited.
"""

import logging
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from zerolab.contract.spec import ENV_COLLECTIVE_TIMEOUT
from zerolab.errors import ConfigError
from zerolab.ranks import RankLocation
from zerotrial.engine.comm.communicator import PeerError
from zerotrial.engine.comm.process_group import destroy_process_groups
from zerotrial.engine.comm.ranks import GroupRanks
from zerotrial.engine.mesh import new_cpu_group

__all__ = [
    "CollectiveError",
    "Distributed",
    "PlannedRanks",
    "collective_timeout_s",
    "is_peer_failure",
]

logger = logging.getLogger(__name__)

T = TypeVar("T")

_DEFAULT_TIMEOUT_S = 600.0


class CollectiveError(RuntimeError):
    """The other ranks did not take part in an exchange, or the connection to them broke."""


class Distributed(RankLocation, GroupRanks):
    """Ranks of one run, as seen from one of them.

    Works for a single process, too. ``context.distributed`` has one.

    Args:
        rank: Rank of this process over all machines; 0 is the chief.
        size: Number of processes.
        local_rank: Rank of this process on its machine.
        local_size: Number of processes on this machine.
        timeout_s: Maximum wait for the other ranks in an exchange, in seconds.

    Example:
        >>> ranks = zerotrial.Distributed()
        >>> ranks.size, ranks.is_chief, ranks.allgather(0.5)
        (1, True, [0.5])
    """

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        local_rank: int = 0,
        local_size: int = 1,
        *,
        timeout_s: float = _DEFAULT_TIMEOUT_S,
    ) -> None:
        group = None
        if size > 1:
            group = new_cpu_group(timedelta(seconds=timeout_s))
        super().__init__(group)
        self.rank = rank
        self.size = size
        self.local_rank = local_rank
        self.local_size = local_size
        self.timeout_s = timeout_s
        self._owns_default_group = False

    @classmethod
    def from_environment(cls, *, cuda: bool, timeout_s: float | None = None) -> "Distributed":
        """Join the ranks that torchrun, or Zerolab's launcher, has started. **Collective**.

        Without their variables in the environment the process is the only rank. An existing process
        group is used unchanged.

        Args:
            cuda: Whether the ranks compute on GPUs.
            timeout_s: Timeout of every collective, in seconds; None reads it from the environment.

        Returns:
            The ranks of this run.

        Raises:
            ConfigError: If the timeout in the environment is not a number of seconds.

        Example:
            >>> zerotrial.Distributed.from_environment(cuda=False).size
            1
        """
        timeout_s = collective_timeout_s() if timeout_s is None else timeout_s
        if "WORLD_SIZE" not in os.environ and not dist.is_initialized():
            return cls(timeout_s=timeout_s)
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        local_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        owns = not dist.is_initialized()
        if owns:
            _initialize(cuda=cuda, local_rank=local_rank, timeout_s=timeout_s)
        rank, size = dist.get_rank(), dist.get_world_size()
        joined = cls(rank, size, local_rank, local_size, timeout_s=timeout_s)
        joined._owns_default_group = owns
        return joined

    @property
    def is_local_chief(self) -> bool:
        """Whether this is the first rank of its machine."""
        return self.local_rank == 0

    def gather(self, value: Any, operation: str = "gather") -> list[Any] | None:
        """Collect the values of all ranks on the chief. **Collective**.

        Args:
            value: Any object that can be pickled.
            operation: Name of the exchange, for errors.

        Returns:
            On the chief the values in the order of ranks; None on other ranks.

        Raises:
            CollectiveError: If a rank does not take part in time.

        Example:
            >>> zerotrial.Distributed().gather("ready")
            ['ready']
        """
        if self._group is None:
            return [value]
        values: list[Any] | None = [None] * self.size if self.is_chief else None
        group = self._group
        self._exchange(operation, lambda: dist.gather_object(value, values, dst=0, group=group))
        return values

    def close(self) -> None:
        """Leave the run together with the other ranks. **Collective**.

        No rank then breaks a connection that another one still needs.

        Raises:
            CollectiveError: If a rank does not take part in time.

        Example:
            >>> ranks = zerotrial.Distributed()
            >>> ranks.close()
        """
        self.barrier("the last barrier before the end")
        self._group = None
        if self._owns_default_group and dist.is_initialized():
            destroy_process_groups()

    def _exchange(self, operation: str, run: Callable[[], Any]) -> None:
        try:
            run()
        except RuntimeError as error:
            raise CollectiveError(
                f"rank {self.rank} of {self.size}: {operation}: {describe(error, self.timeout_s)}"
            ) from error


class PlannedRanks(Distributed):
    """Rank 0 of ranks that are not running, for planning.

    Collectives return at once, as if all ranks gave the same value.

    Args:
        size: Number of ranks.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = self.local_size = size

    def allgather(self, value: T, operation: str = "allgather") -> list[T]:
        """Return the value once for each rank."""
        del operation
        return [value] * self.size

    def gather(self, value: Any, operation: str = "gather") -> list[Any]:
        """Return the value once for each rank."""
        return self.allgather(value, operation)


def collective_timeout_s() -> float:
    """Return the timeout of a collective in seconds, from the environment.

    Raises:
        ConfigError: If the variable is not a positive number.
    """
    text = os.environ.get(ENV_COLLECTIVE_TIMEOUT, "")
    try:
        seconds = float(text) if text else _DEFAULT_TIMEOUT_S
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e9:
        problem = f"{ENV_COLLECTIVE_TIMEOUT}: must be a number of seconds > 0, got {text!r}"
        raise ConfigError("environment", [problem])
    return seconds


def describe(error: BaseException, timeout_s: float) -> str:
    """Describe a failed collective in one line."""
    text = str(error)
    if "imed out" in text or "imeout" in text:
        return (
            f"the other ranks did not answer within {timeout_s:g} s (one hangs, or does something "
            f"else; {ENV_COLLECTIVE_TIMEOUT} sets the limit)"
        )
    return f"the connection to another rank broke ({text.strip().splitlines()[0][:200]})"


_PEER_WORDS = (
    "gloo",
    "NCCL",
    "Connection reset",
    "closed by peer",
    "Timed out waiting",
    "TCPStore",
)


def is_peer_failure(error: BaseException) -> bool:
    """Whether an error came over the network from another rank, and is not this rank's own."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, CollectiveError | PeerError | dist.DistError):
            return True
        if isinstance(seen, RuntimeError) and any(word in str(seen) for word in _PEER_WORDS):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def _initialize(*, cuda: bool, local_rank: int, timeout_s: float) -> None:
    if cuda:
        torch.cuda.set_device(local_rank % torch.cuda.device_count())
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=timedelta(seconds=timeout_s)
    )
