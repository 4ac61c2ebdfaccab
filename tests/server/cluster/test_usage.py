"""Usage reports: slot-hours within a month, by user, label and pool, on both databases."""

import datetime

import pytest

from tests.server.access.test_users import add_user, ask
from tests.server.helpers import Server, checkpoint


def at(text: str) -> float:
    return datetime.datetime.fromisoformat(text).replace(tzinfo=datetime.UTC).timestamp()


def run(server: Server, start: str, hours: float, **config: object) -> int:
    """Train an experiment from a time on; return its id."""
    server.clock.now = at(start)
    number: int = server.submit(**config)["id"]
    server.tick()
    trial_id = server.trials(number)[0]["id"]
    spec = server.begin(trial_id)
    server.report(spec.run_id, checkpoint(10, str(number)))
    server.clock.now += hours * 3600
    server.exit(spec.run_id, 0)
    return number


def hours(server: Server, by: str, month: str) -> dict[str, float]:
    rows = server.get("/usage", by=by, month=month)["usage"]
    return {row["name"]: round(row["slot_hours"], 6) for row in rows}


def test_usage_counts_slot_hours_of_month(server: Server) -> None:
    server.add_agent(slots=2)
    two = {"resources": {"slots_per_trial": 2}}
    first = run(server, "2026-10-31T22:00", 5, labels=["a", "b"], **two)
    run(server, "2026-11-10T00:00", 1.5, labels=["=b"])
    server.clock.now = at("2026-12-31T23:00")
    server.submit()
    server.tick()
    server.clock.now += 1800  # the third is open
    assert hours(server, "pool", "2026-10") == {"default": 4.0}
    assert hours(server, "label", "2026-11") == {"a": 6.0, "b": 6.0, "=b": 1.5}
    assert hours(server, "user", "2026-11") == {"admin": 7.5}
    assert hours(server, "label", "2026-12") == {"": 0.5, "a": 0.0, "b": 0.0, "=b": 0.0}
    (row,) = server.get("/usage", by="pool", month="2026-11")["usage"]
    assert (row["experiments"], row["disk_bytes"]) == (2, 20)
    assert server.get("/usage")["month"] == "2026-12"
    assert server.get("/usage", month="2025-02")["usage"][0]["experiments"] == 0
    server.request("DELETE", f"/experiments/{first}")
    assert hours(server, "pool", "2026-10") == {"default": 0.0}


def test_usage_by_owner(server: Server) -> None:
    server.add_agent()
    ann = add_user(server, "ann", "member")
    run(server, "2026-11-10T00:00", 1)
    ask(server, ann, "POST", "/experiments/1/fork", json={})
    server.tick()
    run_id = server.begin(2).run_id
    server.clock.now += 7200
    server.exit(run_id, 0)
    assert list(hours(server, "user", "2026-11").items()) == [("ann", 2.0), ("admin", 1.0)]
    server.post("/projects", {"name": "vision"})
    server.request("PATCH", "/experiments/2", json={"project": "vision"})
    projects = hours(server, "project", "2026-11")
    assert list(projects.items()) == [("vision", 2.0), ("default", 1.0)]


@pytest.mark.parametrize("month", ["2026-13", "2026", "1969-01", "2026-1", "x"])
def test_invalid_month_is_refused(sqlite_server: Server, month: str) -> None:
    response = sqlite_server.http.get("/api/v1/usage", params={"month": month})
    assert response.status_code == 422
    assert response.json()["error"]["problems"][0].startswith("month: must be YYYY-MM")
