"""Settings of a server: data directory, address, timeouts and limits."""

from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from zerolab.contract.limits import ARCHIVE_BYTES

__all__ = ["Limits", "Settings", "Timings"]


class Timings(msgspec.Struct, frozen=True):
    """Timeouts and intervals, in seconds."""

    agent_dead_s: float = 60.0
    """Time without requests after which an agent is lost and its runs fail."""

    agent_silent_s: float = 25.0
    """Time without requests after which no new run starts on an agent."""

    agent_wait_s: float = 10.0
    """Maximum duration of an agent's long poll for work, which is also its heartbeat."""

    tick_s: float = 1.0
    """Interval between checks of deadlines, back-offs and dead agents."""

    backoff_first_s: float = 1.0
    """Delay before the first restart of a trial; doubles with every further one."""

    backoff_most_s: float = 60.0
    """Maximum delay before a restart."""

    grow_first_s: float = 60.0
    """Minimum duration of an elastic run before it is preempted for more slots; doubles each time
    the trial grows."""

    grow_most_s: float = 3600.0
    """Maximum of that duration."""

    storage_check_s: float = 10.0
    """Timeout of a submission's check of its object store."""

    late_logs_s: float = 86400.0
    """Time after the end of a run during which late log lines are accepted."""

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


class Limits(msgspec.Struct, frozen=True):
    """Maximum sizes of requests (413 beyond them) and of a trial's stored data."""

    metric_names: int = 1000
    """Maximum number of metric names of a trial; further ones are discarded."""

    log_bytes: int = 64 * 1024**2
    """Maximum size of a run's log; the oldest lines are dropped."""

    audit_days: int | None = None
    """Days after which an entry of the audit log is deleted; None keeps all."""

    archive_bytes: int = ARCHIVE_BYTES
    """Maximum size of a compressed model directory."""

    searcher_memory_bytes: int = 4 * 1024**3
    """Maximum memory of the process of a custom searcher class."""

    searcher_cpu_s: int = 3600
    """Maximum CPU time of such a process, in seconds."""

    body_bytes: int = 100 * 1024**2
    """Maximum size of a body with an archive."""

    small_body_bytes: int = 16 * 1024**2
    """Maximum size of any other body."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a server."""

    home: Path
    """Directory of the installation's data."""

    host: str = "127.0.0.1"
    port: int = 8080
    """Port; 0 for any free one."""

    database_url: str = ""
    """SQLAlchemy URL; empty for SQLite in the home directory."""

    synchronous: Literal["full", "normal"] = "full"
    """SQLite: ``full`` survives a power failure; ``normal`` only a crash of the server, but is
    faster for single reports."""

    allow_remote: bool = False
    """Listen beyond loopback, with TLS or because the user allows it without."""

    host_names: tuple[str, ...] = ()
    """Additional host names of this server."""

    task_domain: str = ""
    """Domain below which each task with a port has a host name; empty for ``localhost`` alone."""

    behind_https: bool = False
    """Assume that browsers use HTTPS, although request headers do not show it."""

    custom_searchers: bool = True
    """Run searcher classes of model directories on this machine."""

    private_webhooks: bool = False
    """Send notifications to private networks and to this machine, too."""

    oidc: Any = None
    """Settings of the sign-in with an OpenID Connect provider, see the extension ``oidc``."""

    timings: Timings = Timings()
    limits: Limits = Limits()
