"""A plan that is run again on what is left when machines are lost: ``zerolab launch --elastic``."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from zerolab.contract.outcome import Outcome
from zerolab.contract.spec import EXIT_INFRASTRUCTURE
from zerolab.errors import ConfigError
from zerolab.launcher.nodes.head import Head, Place, Plan
from zerolab.launcher.nodes.messages import Said

__all__ = ["Elastic", "NodeBounds"]


@dataclass(frozen=True)
class NodeBounds:
    """On how many machines a plan may run."""

    least: int
    most: int

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


class Elastic:
    """Runs a plan, and again on other machines while enough are left; the script resumes by itself.

    Args:
        plan: What shall run where; machines beyond ``bounds.most`` stand in for lost ones.
        bounds: On how many machines.
        show: Told every line that a rank writes, with the host.
        tell: Told in a sentence that it begins again, and on what.
    """

    def __init__(
        self,
        plan: Plan,
        bounds: NodeBounds,
        show: Callable[[str, Said], None],
        tell: Callable[[str], None],
    ) -> None:
        self._plan = plan
        self._bounds = bounds
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
        while True:
            plan = replace(self._plan, places=left[: self._bounds.most])
            self._head = Head(plan, self._show)
            if self._asked:  # before this head was there to be told
                self._head.stop()
            host, end = self._head.run()
            lost = self._head.lost
            if self._asked or not lost or end.exit_code != EXIT_INFRASTRUCTURE:
                return host, end
            left = [place for place in left if place.host not in lost]
            if len(left) < self._bounds.least:
                least = f"min_elastic_nodes is {self._bounds.least}"
                reason = f"{end.reason}; of the machines {len(left)} are left, and {least}"
                return host, Outcome(end.exit_code, reason, end.rank, end.told)
            self._tell(f"{host}: {end.reason}; the script starts again on {_words(left, plan)}")


def _words(left: Sequence[Place], plan: Plan) -> str:
    now = left[: len(plan.places)]
    names = ", ".join(place.host for place in now)
    return f"{len(now)} of {len(plan.places)} machines: {names}"
