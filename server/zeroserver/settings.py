"""How one server is set up: where its data lies, where it listens, how patient it is."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from zerolab.contract.limits import ARCHIVE_BYTES

__all__ = ["Limits", "Settings", "Timings"]


@dataclass(frozen=True)
class Timings:
    """Patience, in seconds."""

    agent_dead_s: float = 60.0
    """An agent that has not asked for work for so long is gone: its runs are given up."""

    agent_silent_s: float = 25.0
    """Nothing new is started on an agent that has not asked for work for so long."""

    agent_wait_s: float = 10.0
    """Longest wait of an agent's question for work, which is its heartbeat too."""

    tick_s: float = 1.0
    """How often deadlines, back-offs and dead agents are looked for."""

    backoff_first_s: float = 1.0
    """Wait before the first restart of a trial; it doubles with every further one."""

    backoff_most_s: float = 60.0
    """The longest wait before a restart."""

    grow_first_s: float = 60.0
    """A run on fewer slots than its trial was made for is not asked to leave for more before; it
    doubles with every time that its trial has done so."""

    grow_most_s: float = 3600.0
    """The longest such time."""

    storage_check_s: float = 10.0
    """Longest wait of a submission for the object store that its checkpoints go to."""

    late_logs_s: float = 86400.0
    """How long after the end of a run its agent may still deliver lines of its log."""

    expiry_s: float = 600.0
    """How often logs are looked for whose retention is over."""

    login_code_s: float = 300.0
    """How long a one-time login link can be used."""

    session_s: float = 30 * 86400.0
    """How long a browser stays logged in."""

    def with_agent_timeout(self, seconds: float) -> "Timings":
        """Give agents so long before they are gone; the shorter, the more often they ask."""
        scale = min(seconds / self.agent_dead_s, 1.0)
        return replace(
            self,
            agent_dead_s=seconds,
            agent_silent_s=self.agent_silent_s * scale,
            agent_wait_s=self.agent_wait_s * scale,
        )


@dataclass(frozen=True)
class Limits:
    """Sizes of requests, refused with 413 beyond them, and what one trial may store."""

    metric_names: int = 1000
    """Different metric names of a trial; metrics with further ones are discarded."""

    log_bytes: int = 64 * 1024**2
    """Log of a run; beyond it the oldest lines are dropped."""

    archive_bytes: int = ARCHIVE_BYTES
    """Compressed model directory."""

    searcher_memory_bytes: int = 4 * 1024**3
    """Memory of the process of a custom searcher class."""

    searcher_cpu_s: int = 3600
    """Processor time of such a process, in seconds."""

    body_bytes: int = 100 * 1024**2
    """Any body: an archive and its form around it."""

    small_body_bytes: int = 16 * 1024**2
    """Bodies of all routes but the one that takes archives."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything that a server is told from outside."""

    home: Path
    """Directory of the installation's data."""

    host: str = "127.0.0.1"
    port: int = 8080
    """0 asks the system for a free one."""

    database_url: str = ""
    """SQLAlchemy URL; empty for SQLite in the home directory."""

    synchronous: Literal["full", "normal"] = "full"
    """SQLite: ``full`` survives a power cut; ``normal`` only the death of the server, and is
    faster where reports come one by one."""

    allow_remote: bool = False
    """Listen beyond loopback: there is TLS, or the user wants it without."""

    host_names: tuple[str, ...] = ()
    """Further names by which browsers and agents may call this server."""

    behind_https: bool = False
    """Every browser uses HTTPS, although requests do not say so."""

    custom_searchers: bool = True
    """Run searcher classes of model directories on this machine."""

    timings: Timings = field(default_factory=Timings)
    limits: Limits = field(default_factory=Limits)
