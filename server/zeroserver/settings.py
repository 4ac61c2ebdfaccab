"""Settings of a server: data directory, address, timeouts and limits."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from zerolab.contract.limits import ARCHIVE_BYTES

__all__ = ["Limits", "Settings", "Timings"]


@dataclass(frozen=True)
class Timings:
    """Timeouts and intervals, in seconds."""

    agent_dead_s: float = 60.0
    """Silence after which an agent is lost and its runs fail."""

    agent_silent_s: float = 25.0
    """Silence after which no new run starts on an agent."""

    agent_wait_s: float = 10.0
    """Maximum duration of an agent's long poll for work, which is its heartbeat too."""

    tick_s: float = 1.0
    """Interval between checks of deadlines, back-offs and dead agents."""

    backoff_first_s: float = 1.0
    """Wait before the first restart of a trial; it doubles with every further one."""

    backoff_most_s: float = 60.0
    """Maximum wait before a restart."""

    grow_first_s: float = 60.0
    """A run on fewer slots than its trial was made for is not asked to leave for more before; it
    doubles with every time that its trial has done so."""

    grow_most_s: float = 3600.0
    """Maximum of that time."""

    storage_check_s: float = 10.0
    """Timeout of a submission's check of its object store."""

    late_logs_s: float = 86400.0
    """Time after the end of a run in which its agent may still deliver log lines."""

    expiry_s: float = 600.0
    """Interval between removals of expired logs."""

    login_code_s: float = 300.0
    """Lifetime of a one-time login link."""

    session_s: float = 30 * 86400.0
    """Lifetime of a browser session."""

    def with_agent_timeout(self, seconds: float) -> "Timings":
        """Set the agent timeout; a shorter one makes agents poll more often."""
        scale = min(seconds / self.agent_dead_s, 1.0)
        return replace(
            self,
            agent_dead_s=seconds,
            agent_silent_s=self.agent_silent_s * scale,
            agent_wait_s=self.agent_wait_s * scale,
        )


@dataclass(frozen=True)
class Limits:
    """Maximum sizes of requests (413 beyond them) and of a trial's stored data."""

    metric_names: int = 1000
    """Maximum number of metric names of a trial; further ones are discarded."""

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
    """Settings of a server."""

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
    """Additional host names of this server."""

    behind_https: bool = False
    """Every browser uses HTTPS, although requests do not say so."""

    custom_searchers: bool = True
    """Run searcher classes of model directories on this machine."""

    timings: Timings = field(default_factory=Timings)
    limits: Limits = field(default_factory=Limits)
