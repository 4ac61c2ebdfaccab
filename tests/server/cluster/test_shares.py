"""Fair share between users over REST, on both databases."""

from tests.server.access.test_users import add_user, ask
from tests.server.helpers import Server


def finish(server: Server, seconds: float) -> int:
    """End the only run after a while; return its experiment."""
    (item,) = server.work()
    server.post(f"/runs/{item.run_id}/started", {})
    server.clock.now += seconds
    server.exit(item.run_id, 0)
    return item.spec.experiment_id


def test_users_share_slot_time(server: Server) -> None:
    """Slot time counts, not the number of experiments or their order, also after a restart."""
    ann = add_user(server, "ann", "member")
    for _ in range(7):
        server.submit()
    for _ in range(2):
        ask(server, ann, "POST", "/experiments/1/fork", json={}).raise_for_status()
    server.add_agent()
    assert finish(server, 100) == 1  # of the administrator
    assert finish(server, 30) == 8  # of ann
    server.services.orchestrator.queue.usage = None  # as after a restart
    assert finish(server, 30) == 9
    assert finish(server, 30) == 2  # ann has nothing more to run
    server.request("PATCH", "/users/ann", json={"weight": 0.25})
    ask(server, ann, "POST", "/experiments/1/fork", json={}).raise_for_status()
    assert finish(server, 1000) == 3
    assert finish(server, 60) == 10  # 60 s for a quarter of the weight are less than 1160 s
    users = {user["name"]: user["weight"] for user in server.get("/users")["users"]}
    assert users == {"admin": 1.0, "ann": 0.25}


def test_places_follow_the_shares(sqlite_server: Server) -> None:
    """The places are the order in which the experiments start, with the reason."""
    server = sqlite_server
    ann = add_user(server, "ann", "member")
    for _ in range(4):
        server.submit()
    for _ in range(2):
        ask(server, ann, "POST", "/experiments/1/fork", json={}).raise_for_status()
    server.add_agent()
    assert [item.spec.experiment_id for item in server.work()] == [1]
    jobs = server.get("/jobs")["jobs"]
    assert [(row["experiment_id"], row["place"]) for row in jobs] == [
        (1, None), (5, 1), (2, 2), (6, 3), (3, 4), (4, 5),
    ]  # fmt: skip
    reasons = {row["experiment_id"]: row["order_reason"] for row in jobs}
    assert "user admin holds 1 slot, and a fair share is 0.5" in reasons[2]
    assert reasons[5] is reasons[6] is None
    started = [finish(server, 1) for _ in range(6)]
    assert started[:3] == [1, 5, 2]
    server.request("PUT", "/pools/default", json={"policy": "fifo"})


def test_invalid_weight_is_refused(sqlite_server: Server) -> None:
    for weight in (0, -1, "x", 1e9):
        response = sqlite_server.http.patch("/api/v1/users/admin", json={"weight": weight})
        assert response.status_code == 422, weight
        assert "weight" in response.text
