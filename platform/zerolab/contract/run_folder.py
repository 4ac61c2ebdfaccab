"""The directory of one run on its machine: the only module that knows the names inside.

```
run.json                 what the ranks need to know (zerolab.contract.spec.RunSpec)
model/                   this run's own copy of the model directory; the ranks' working directory
spool/                   reports that the server has not taken yet
logs/rank_N.out, .err    what rank N wrote
logs/agent.log           what the agent says about the run
logs/launcher.log        torch's elastic agent, for us
ranks/N                  process id of rank N
ranks/ready_N            rank N heeds SIGTERM
reason.json              why a rank ended on purpose
exit.json                how the run ended, written by the launcher
launcher.json            process of the launcher
shipped.json             which log lines the server has
delivered                the server knows how the run ended: nothing is left to do
```
"""

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from zerolab.files import append_private

__all__ = ["RunFolder"]


@dataclass(frozen=True)
class RunFolder:
    """Paths of one run."""

    path: Path

    @property
    def spec(self) -> Path:
        """The :class:`zerolab.contract.spec.RunSpec` as JSON."""
        return self.path / "run.json"

    @property
    def model(self) -> Path:
        """Working directory of the ranks."""
        return self.path / "model"

    @property
    def logs(self) -> Path:
        """Directory of the logs."""
        return self.path / "logs"

    @property
    def agent_log(self) -> Path:
        """What the agent says about the run; shipped like the ranks' own lines."""
        return self.logs / "agent.log"

    @property
    def launcher_log(self) -> Path:
        """Output of the launcher itself; kept, not shipped."""
        return self.logs / "launcher.log"

    @property
    def ranks(self) -> Path:
        """One file for each rank that has been started, with its process id."""
        return self.path / "ranks"

    @property
    def reason(self) -> Path:
        """``{"exit_code", "reason"}`` of a rank that ended on purpose."""
        return self.path / "reason.json"

    @property
    def exit(self) -> Path:
        """``{"exit_code", "reason", "rank"}`` of the whole run."""
        return self.path / "exit.json"

    @property
    def launcher(self) -> Path:
        """``{"pid"}`` of the launcher."""
        return self.path / "launcher.json"

    @property
    def shipped(self) -> Path:
        """Cursor of the log shipper."""
        return self.path / "shipped.json"

    @property
    def delivered(self) -> Path:
        """Marker: the server has acknowledged the end of the run."""
        return self.path / "delivered"

    def stdout(self, rank: int) -> Path:
        """What a rank wrote to standard output."""
        return self.logs / f"rank_{rank}.out"

    def stderr(self, rank: int) -> Path:
        """What a rank wrote to standard error."""
        return self.logs / f"rank_{rank}.err"

    def ready(self, rank: int) -> Path:
        """Marker: SIGTERM has this rank checkpoint, where it would have died of it before."""
        return self.ranks / f"ready_{rank}"

    def rank_pids(self) -> dict[int, int]:
        """Return the process ids of the ranks that have been started, by rank."""
        found = {}
        for file in self.ranks.glob("[0-9]*"):
            text = file.read_text(encoding="ascii").strip()
            if text:
                found[int(file.name)] = int(text)
        return dict(sorted(found.items()))

    def create(self) -> None:
        """Make the directories."""
        for directory in (self.path, self.model, self.logs, self.ranks):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)

    def say(self, text: str) -> None:
        """Add lines to what the agent says about the run.

        Raises:
            OSError: If they cannot be written.
        """
        now = datetime.now(UTC).strftime("%H:%M:%SZ")
        with append_private(self.agent_log) as file:
            lines = (f"{now} {line}\n" for line in text.splitlines() if line.strip())
            file.write("".join(lines).encode())
