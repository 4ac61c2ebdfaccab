"""Quotas of users by default, and requests for larger ones, on both databases."""

from typing import Any

from tests.server.access.test_users import add_user, ask
from tests.server.cluster.test_queue import error_text, job
from tests.server.helpers import Server


def test_default_quota_applies_to_each_user(server: Server) -> None:
    """Users without a quota have the default, separately; a quota of a user replaces it."""
    tokens = {name: add_user(server, name, "member") for name in ("ann", "bob")}
    server.add_agent(6)
    server.request("PUT", "/quotas/user/*", json={"max_slots": 1})
    server.request("PUT", "/quotas/user/bob", json={"max_slots": 2})
    server.submit()
    for token in (*tokens.values(), *tokens.values(), tokens["bob"]):
        ask(server, token, "POST", "/experiments/1/fork", json={}).raise_for_status()
    used = {
        quota["group"]: (quota["held_slots"], quota["max_slots"], quota["is_default"])
        for quota in server.get("/quotas")["quotas"]
    }
    assert used == {
        "user:*": (2, 1, False), "user:admin": (1, 1, True), "user:ann": (1, 1, True),
        "user:bob": (2, 2, False),
    }  # fmt: skip
    assert [job(server, number)["owner"] for number in (1, 2)] == ["admin", "ann"]
    assert job(server, 1)["project"] is None  # the only one
    reason = job(server, 4)["waiting_reason"]
    assert reason == "it needs 1 slot, and 1 of the 1 of quota user:ann are held"
    server.submit(resources={"slots_per_trial": 2})
    assert "`zerolab quota request 2`" in job(server, 7)["waiting_reason"]
    server.request("DELETE", "/quotas/user/*")
    assert job(server, 4)["waiting_reason"] is None


def test_quota_request_is_approved_or_declined(server: Server) -> None:
    ann, vic = add_user(server, "ann", "member"), add_user(server, "vic", "viewer")
    wish = {"max_slots": 8, "reason": "a large model"}

    def request(token: str, **changes: Any) -> Any:
        response = ask(server, token, "POST", "/quota-requests", json=wish | changes)
        return response.json()["request"] if response.is_success else response.json()["error"]

    assert request(ann)["message"] == "user ann has no quota, so there is nothing to request"
    text = error_text(server, "PUT", "/quotas/user/*", {"max_slots": 4, "request_limit": 3}, 422)
    assert "request_limit: must be at least max_slots = 4, got 3" in text
    text = error_text(server, "PUT", "/quotas/user/ann", {"max_slots": 4, "request_limit": 5}, 422)
    assert "request_limit: must be set with user:*" in text
    server.request("PUT", "/quotas/user/*", json={"max_slots": 4, "request_limit": 16})
    assert (
        "must be more than 4, the quota of user ann, got 4" in request(ann, max_slots=4)["message"]
    )
    assert "must be at most 16, the most that a user may" in request(ann, max_slots=17)["message"]
    assert "needs the role member" in request(vic)["message"]
    first, second = request(ann)["id"], request(ann, max_slots=6)["id"]
    (listed,) = ask(server, vic, "GET", "/quota-requests").json()["requests"]
    assert (listed["id"], listed["user"], listed["state"]) == (second, "ann", "OPEN")
    assert f"no request {first}" in error_text(
        server, "POST", f"/quota-requests/{first}/approve", {}, 404
    )
    path = f"/quota-requests/{second}/approve"
    assert ask(server, ann, "POST", path, json={}).status_code == 403
    approved = server.post(path, {"reason": "until Friday"})["request"]
    assert (approved["state"], approved["decided_by"], approved["answer"]) == (
        "APPROVED", "admin", "until Friday",
    )  # fmt: skip
    limits = {quota["group"]: quota["max_slots"] for quota in server.get("/quotas")["quotas"]}
    assert limits["user:ann"] == 6
    text = error_text(server, "POST", f"/quota-requests/{second}/decline", {}, 409)
    assert text == f"request {second} is APPROVED already"
    third = request(ann, max_slots=7)["id"]
    server.request("PUT", "/quotas/user/ann", json={"max_slots": 9})
    text = error_text(server, "POST", f"/quota-requests/{third}/approve", {}, 409)
    assert "is for 7 slots, but user ann has a quota of 9 slots; decline it" in text
    declined = server.post(f"/quota-requests/{third}/decline", {})["request"]
    assert declined["state"] == "DECLINED"
    listed = server.get("/quota-requests", state="DECLINED")["requests"]
    assert [item["id"] for item in listed] == [third]
