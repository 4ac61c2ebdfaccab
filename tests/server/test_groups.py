"""Groups of experiments."""

from typing import Any

import pytest

from tests.server.access.test_users import add_user, ask
from tests.server.helpers import Server, validation


def groups(server: Server, by: str, **filters: Any) -> dict[Any, tuple[int, int, list[Any]]]:
    """Return number, number of unfinished ones and best results by value."""
    answer = server.get("/experiments/groups", by=by, **filters)
    return {
        group["value"]: (
            group["experiments"],
            group["unfinished"],
            [(best["value"], best["experiment_id"]) for best in group["best"]],
        )
        for group in answer["groups"]
    }


def test_groups_of_experiments(server: Server) -> None:
    ann = add_user(server, "ann", "member")
    server.add_agent(3)
    for position, (rate, labels) in enumerate(((0.1, ["a", "b"]), (0.2, ["a"]), (0.1, []))):
        server.submit(hyperparameters={"lr": rate}, labels=labels, name=f"e{position}")
    for trial_id, loss in ((1, 0.5), (2, 0.25), (3, 0.75)):
        run_id = server.begin(trial_id).run_id
        server.report(run_id, validation(10, loss))
        server.exit(run_id, 0)
    ask(server, ann, "POST", "/experiments/1/fork", json={"activate": False})

    assert groups(server, "user") == {"admin": (3, 0, [(0.25, 2)]), "ann": (1, 1, [])}
    assert groups(server, "label") == {
        "a": (3, 1, [(0.25, 2)]), "b": (2, 1, [(0.5, 1)]), None: (1, 0, [(0.75, 3)]),
    }  # fmt: skip
    assert groups(server, "hyperparameters.lr") == {
        0.1: (3, 1, [(0.5, 1)]), 0.2: (1, 0, [(0.25, 2)]),
    }  # fmt: skip
    assert groups(server, "state", user="admin") == {"COMPLETED": (3, 0, [(0.25, 2)])}
    assert groups(server, "state", name="e1") == {"COMPLETED": (1, 0, [(0.25, 2)])}
    assert groups(server, "resources.slots_per_trial") == {1: (4, 1, [(0.25, 2)])}
    for by in ("project", "pool", "resources.x.y", "nothing.x"):
        assert len(groups(server, by)) == 1
    largest = server.get("/experiments/groups", by="user")["groups"][0]["value"]
    assert largest == "admin"


def test_groups_show_no_secret(sqlite_server: Server) -> None:
    server = sqlite_server
    server.submit(data={"token": "hush-1"})
    answer = server.http.get("/api/v1/experiments/groups", params={"by": "data.token"})
    assert "hush" not in answer.text


@pytest.mark.parametrize("by", ["", "lr", "hyperparameters.", "owner", "a..b"])
def test_unknown_group_is_refused(sqlite_server: Server, by: str) -> None:
    refused = sqlite_server.http.get("/api/v1/experiments/groups", params={"by": by})
    assert refused.status_code == 422
    assert "hyperparameters.lr" in refused.text
