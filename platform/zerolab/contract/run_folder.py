"""Directory of a run on its machine: the names of all files inside.

```
run.json                 everything that the ranks need (zerolab.contract.spec.RunSpec)
model/                   this run's copy of the model directory; the ranks' working directory
spool/                   reports that the server has not stored yet
media/                   media that the storage does not have yet
logs/rank_N.out, .err    output of rank N
logs/agent.log           messages of the agent about the run
logs/launcher.log        output of the launcher
ranks/N                  process id of rank N
ranks/ready_N            rank N handles SIGTERM
reason.json              why a rank ended on purpose
exit.json                how the run ended, written by the launcher
unread.json              searched hyperparameters that the code did not read
launcher.json            process of the launcher
shipped.json             cursor of the log lines that the server has
delivered                the server has the outcome: nothing is left to do
```
"""

from datetime import UTC, datetime
from pathlib import Path

import msgspec

from zerolab.files import append_private

__all__ = ["RunFolder"]


class RunFolder(msgspec.Struct, frozen=True):
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
        """Messages of the agent about the run; shipped like the ranks' lines."""
        return self.logs / "agent.log"

    @property
    def launcher_log(self) -> Path:
        """Output of the launcher; kept, not shipped."""
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
    def unread(self) -> Path:
        """``{"names"}`` of searched hyperparameters that the code did not read."""
        return self.path / "unread.json"

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
        """Standard output of a rank."""
        return self.logs / f"rank_{rank}.out"

    def stderr(self, rank: int) -> Path:
        """Standard error of a rank."""
        return self.logs / f"rank_{rank}.err"

    def ready(self, rank: int) -> Path:
        """Marker: this rank checkpoints on SIGTERM; before, it would be killed by the signal."""
        return self.ranks / f"ready_{rank}"

    def rank_pids(self) -> dict[int, int]:
        """Return the process ids of the ranks that have been started, by rank."""
        pids = {}
        for file in self.ranks.glob("[0-9]*"):
            text = file.read_text(encoding="ascii").strip()
            if text:
                pids[int(file.name)] = int(text)
        return dict(sorted(pids.items()))

    def create(self) -> None:
        """Create the directories."""
        for directory in (self.path, self.model, self.logs, self.ranks):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)

    def log(self, text: str) -> None:
        """Add lines to the agent's messages about the run.

        Raises:
            OSError: If they cannot be written.
        """
        now = datetime.now(UTC).strftime("%H:%M:%SZ")
        with append_private(self.agent_log) as file:
            lines = (f"{now} {line}\n" for line in text.splitlines() if line.strip())
            file.write("".join(lines).encode())
