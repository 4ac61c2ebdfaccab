"""ElasticRunner restart of a plan on the remaining machines when some are lost.

``zerolab launch --elastic`` restarts at any time. For an experiment, machines that are missing at
the start of a run are left out. A loss during a run ends it, and the server starts another run from
the last checkpoint, which looks for the machines again.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from zerolab.contract.outcome import Outcome
from zerolab.contract.spec import EXIT_INFRASTRUCTURE
from zerolab.errors import ConfigError
from zerolab.extensions.launcher_ssh.coordinator import Coordinator, LaunchPlan, MachineSlots
from zerolab.extensions.launcher_ssh.messages import RankOutput, SpoolPiece

__all__ = ["ElasticRunner", "MachineSelection", "NodeBounds", "RankCounts"]


class MachineSelection(Protocol):
    """Interface: selection of machines among the remaining ones."""

    @property
    def in_mid_run(self) -> bool:
        """Return whether started ranks are restarted; otherwise a loss ends the run."""
        ...

    def choose(self, remaining: Sequence[MachineSlots]) -> list[MachineSlots]:
        """Return the selected machines with their slots; none if too few remain."""
        ...

    def shortage_message(self, remaining: Sequence[MachineSlots]) -> str:
        """Return the message that too few machines remain."""
        ...


@dataclass(frozen=True)
class NodeBounds:
    """Minimum and maximum number of machines of a plan."""

    least: int
    most: int
    in_mid_run = True

    def choose(self, remaining: Sequence[MachineSlots]) -> list[MachineSlots]:
        """Return the first machines, up to the maximum."""
        return list(remaining[: self.most]) if len(remaining) >= self.least else []

    def shortage_message(self, remaining: Sequence[MachineSlots]) -> str:
        """Return the message that too few machines remain."""
        return f"of the machines {len(remaining)} are left, and min_elastic_nodes is {self.least}"

    @classmethod
    def of(cls, plan: LaunchPlan, least: int | None, most: int | None) -> "NodeBounds":
        """Create bounds; by default 1 and all machines.

        Raises:
            ConfigError: If there are fewer machines, or the launch is one of several.
        """
        hosts = len(plan.places)
        problems = []
        if plan.nodes is not None:
            problems.append("elastic: needs ssh to all machines, got --no_ssh")
        if not 1 <= (1 if least is None else least) <= (most or hosts):
            bound = f"must be 1 to {'max_elastic_nodes' if most else 'the hosts that are chosen'}"
            problems.append(f"min_elastic_nodes: {bound}, {most or hosts}, got {least}")
        if most is not None and not 1 <= most <= hosts:
            problem = f"must be 1 to {hosts}, the hosts that are chosen, got {most}"
            problems.append(f"max_elastic_nodes: {problem}")
        if problems:
            raise ConfigError("elastic", problems)
        return cls(least or 1, most or hosts)


@dataclass(frozen=True)
class RankCounts:
    """Possible numbers of ranks of a trial: those over which its batch can be divided."""

    counts: Sequence[int]
    """Numbers of ranks, the largest first."""
    in_mid_run = False

    def choose(self, remaining: Sequence[MachineSlots]) -> list[MachineSlots]:
        """Return machines for the largest possible number of ranks."""
        slots = sum(len(machine.slots) for machine in remaining)
        needed = next((count for count in self.counts if count <= slots), 0)
        selected = []
        for machine in remaining:
            if needed > 0:
                selected.append(replace(machine, slots=machine.slots[:needed]))
                needed -= len(machine.slots)
        return selected

    def shortage_message(self, remaining: Sequence[MachineSlots]) -> str:
        """Return the message that too few machines remain."""
        slots = sum(len(machine.slots) for machine in remaining)
        least = f"the trial continues with {min(self.counts)} or more (resources.elastic)"
        return f"the remaining machines have {slots} slots, and {least}"


class ElasticRunner:
    """Runs a plan, and restarts it on other machines while enough remain.

    Args:
        plan: The plan; machines that ``choice`` does not select replace lost ones.
        choice: Selection of machines.
        show: Receives the output of every rank, with the host.
        tell: Receives a message about each restart.
        keep: Receives undelivered reports of an experiment's ranks.
    """

    def __init__(
        self,
        plan: LaunchPlan,
        choice: MachineSelection,
        show: Callable[[str, RankOutput], None],
        tell: Callable[[str], None],
        keep: Callable[[SpoolPiece], None] | None = None,
    ) -> None:
        self._plan = plan
        self._choice = choice
        self._keep = keep
        self._show = show
        self._tell = tell
        self._stop_requests = 0
        self._head: Coordinator | None = None

    def stop(self) -> None:
        """Stop the ranks, on a second call immediately; may be called by a signal handler."""
        self._stop_requests += 1
        if self._head is not None:
            self._head.stop()

    def run(self) -> tuple[str, Outcome]:
        """Run until an end that is not a loss; return the deciding machine and its outcome."""
        remaining = list(self._plan.places)
        chosen = self._choice.choose(remaining)
        while True:
            self._head = Coordinator(replace(self._plan, places=chosen), self._show, self._keep)
            if self._stop_requests:  # stopped before this coordinator existed
                self._head.stop()
            host, end = self._head.run()
            lost = self._head.lost
            if self._stop_requests or not lost or end.exit_code != EXIT_INFRASTRUCTURE:
                return host, end
            if self._head.begun and not self._choice.in_mid_run:
                return host, end
            remaining = [machine for machine in remaining if machine.host not in lost]
            before, chosen = chosen, self._choice.choose(remaining)
            if not chosen:
                reason = f"{end.reason}; {self._choice.shortage_message(remaining)}"
                return host, Outcome(end.exit_code, reason, end.rank, end.was_stopped)
            now = _restart_message(chosen, before)
            begins = "the script starts again" if self._choice.in_mid_run else "the run begins"
            self._tell(f"{host}: {end.reason}; {begins} on {now}")


def _restart_message(now: Sequence[MachineSlots], before: Sequence[MachineSlots]) -> str:
    names = ", ".join(machine.host for machine in now)
    ranks = sum(len(machine.slots) for machine in now)
    counted = f"{ranks} rank{'' if ranks == 1 else 's'}"
    return f"{len(now)} of {len(before)} machines ({counted}): {names}"
