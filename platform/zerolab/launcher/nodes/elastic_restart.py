"""A plan that is run again on what is left when machines are lost.

``zerolab launch --elastic`` does so at any time. For an experiment, machines that are not there
when a run begins are left out of it; a loss in mid-run ends the run, and the server begins another
from the last checkpoint, which finds out anew what is there.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from zerolab.contract.outcome import Outcome
from zerolab.contract.spec import EXIT_INFRASTRUCTURE
from zerolab.errors import ConfigError
from zerolab.launcher.nodes.coordinator import Head, Place, Plan
from zerolab.launcher.nodes.messages import Left, Said

__all__ = ["Choice", "Elastic", "NodeBounds", "RankCounts"]


class Choice(Protocol):
    """Which of the machines that are left are taken."""

    @property
    def in_mid_run(self) -> bool:
        """Whether ranks that had begun are started again; else their run ends with a loss."""
        ...

    def choose(self, left: Sequence[Place]) -> list[Place]:
        """Return those that are taken, with their slots; none where too few are left."""
        ...

    def too_few(self, left: Sequence[Place]) -> str:
        """Say that too few are left, and what was asked for."""
        ...


@dataclass(frozen=True)
class NodeBounds:
    """On how many machines a plan may run."""

    least: int
    most: int
    in_mid_run = True

    def choose(self, left: Sequence[Place]) -> list[Place]:
        """See :meth:`Choice.choose`."""
        return list(left[: self.most]) if len(left) >= self.least else []

    def too_few(self, left: Sequence[Place]) -> str:
        """See :meth:`Choice.too_few`."""
        return f"of the machines {len(left)} are left, and min_elastic_nodes is {self.least}"

    @classmethod
    def of(cls, plan: Plan, least: int | None, most: int | None) -> "NodeBounds":
        """Fill in what is left out: 1, and all machines.

        Raises:
            ConfigError: If that is more than there are, or the launch is one of several.
        """
        hosts = len(plan.places)
        problems = []
        if plan.alone is not None:
            problems.append("elastic: needs ssh to all machines, got --no_ssh")
        if not 1 <= (1 if least is None else least) <= (most or hosts):
            bound = f"must be 1 to {'max_elastic_nodes' if most else 'the hosts that are chosen'}"
            problems.append(f"min_elastic_nodes: {bound}, {most or hosts}, got {least}")
        if most is not None and not 1 <= most <= hosts:
            told = f"must be 1 to {hosts}, the hosts that are chosen, got {most}"
            problems.append(f"max_elastic_nodes: {told}")
        if problems:
            raise ConfigError("elastic", problems)
        return cls(least or 1, most or hosts)


@dataclass(frozen=True)
class RankCounts:
    """With how many ranks a trial goes on: those over which its batch can be divided."""

    counts: Sequence[int]
    """The largest first."""
    in_mid_run = False

    def choose(self, left: Sequence[Place]) -> list[Place]:
        """See :meth:`Choice.choose`. The most ranks that will do; the last machines give fewer."""
        slots = sum(len(place.slots) for place in left)
        rest = next((count for count in self.counts if count <= slots), 0)
        taken = []
        for place in left:
            if rest > 0:
                taken.append(replace(place, slots=place.slots[:rest]))
                rest -= len(place.slots)
        return taken

    def too_few(self, left: Sequence[Place]) -> str:
        """See :meth:`Choice.too_few`."""
        slots = sum(len(place.slots) for place in left)
        least = f"the trial goes on with {min(self.counts)} or more (resources.elastic)"
        return f"the machines that are there have {slots} slots, and {least}"


class Elastic:
    """Runs a plan, and again on other machines while enough are left.

    Args:
        plan: What shall run where; machines that ``choice`` does not take stand in for lost ones.
        choice: Which of the machines are taken.
        show: Told what every rank writes, as it comes, with the host.
        tell: Told in a sentence that it begins again, and on what.
        keep: Told what the ranks of an experiment have left to report.
    """

    def __init__(
        self,
        plan: Plan,
        choice: Choice,
        show: Callable[[str, Said], None],
        tell: Callable[[str], None],
        keep: Callable[[Left], None] | None = None,
    ) -> None:
        self._plan = plan
        self._choice = choice
        self._keep = keep
        self._show = show
        self._tell = tell
        self._asked = 0
        self._head: Head | None = None

    def stop(self) -> None:
        """Have the ranks end, a second time at once; may be called by a signal handler."""
        self._asked += 1
        if self._head is not None:
            self._head.stop()

    def run(self) -> tuple[str, Outcome]:
        """Run it to an end that is no loss; return which machine decided how it ended, and how."""
        left = list(self._plan.places)
        chosen = self._choice.choose(left)
        while True:
            self._head = Head(replace(self._plan, places=chosen), self._show, self._keep)
            if self._asked:  # before this head was there to be told
                self._head.stop()
            host, end = self._head.run()
            lost = self._head.lost
            if self._asked or not lost or end.exit_code != EXIT_INFRASTRUCTURE:
                return host, end
            if self._head.begun and not self._choice.in_mid_run:
                return host, end
            left = [place for place in left if place.host not in lost]
            before, chosen = chosen, self._choice.choose(left)
            if not chosen:
                reason = f"{end.reason}; {self._choice.too_few(left)}"
                return host, Outcome(end.exit_code, reason, end.rank, end.told)
            now = _words(chosen, before)
            begins = "the script starts again" if self._choice.in_mid_run else "the run begins"
            self._tell(f"{host}: {end.reason}; {begins} on {now}")


def _words(now: Sequence[Place], before: Sequence[Place]) -> str:
    names = ", ".join(place.host for place in now)
    ranks = sum(len(place.slots) for place in now)
    counted = f"{ranks} rank{'' if ranks == 1 else 's'}"
    return f"{len(now)} of {len(before)} machines ({counted}): {names}"
