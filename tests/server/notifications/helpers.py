"""Channels, failed experiments and the outbox of a server."""

from typing import Any

from tests.server.helpers import Server
from tests.server.notifications.receiver import Receiver
from tests.waiting import until


def add(server: Server, receiver: Receiver, name: str = "team", **options: Any) -> dict[str, Any]:
    """Add a channel to the receiver; return the response."""
    answer: dict[str, Any] = server.post(
        "/notification-channels", {"name": name, "url": receiver.url, **options}
    )
    receiver.secret = answer["secret"]
    return answer


def fail(server: Server, reason: str = "ValueError: bad", **config: Any) -> int:
    """Submit an experiment whose trial fails; return its id."""
    number: int = server.submit(max_restarts=0, **config)["id"]
    if number == 1:
        server.add_agent()
    trial_id = server.trials(number)[0]["id"]
    server.exit(server.begin(trial_id).run_id, 1, reason)
    return number


def messages(server: Server) -> list[dict[str, Any]]:
    """Return the outbox, oldest first."""
    rows: list[dict[str, Any]] = server.get("/notifications")["notifications"]
    return rows[::-1]


def sent(server: Server, count: int) -> list[dict[str, Any]]:
    """Wait until so many messages are sent; return them."""

    def delivered() -> list[dict[str, Any]]:
        return [row for row in messages(server) if row["state"] == "SENT"]

    return until(f"{count} messages are sent", delivered, lambda rows: len(rows) >= count)
