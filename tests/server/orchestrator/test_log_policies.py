"""Log policies: their effects, and patterns that must not block the server."""

import json
import threading
from collections.abc import Sequence

import pytest

from tests.server.helpers import Server
from zeroserver.orchestrator.log_policies import Match, PolicySearch

BACKTRACKS = "^(a+)+$"
LINE = "a" * 40 + "!"


def test_backtracking_pattern_runs_in_linear_time(server: Server) -> None:
    server.submit(log_policies=[{"name": "endless", "pattern": BACKTRACKS}])
    server.add_agent()
    spec = server.begin()
    assert server.log(spec.run_id, 0, LINE) == 1
    assert server.log(spec.run_id, 1, LINE, "a" * 40) == 3
    assert server.trial()["labels"] == ["endless"]
    server.exit(spec.run_id, -9, "failed", tail=LINE)
    assert server.trial()["restarts"] == 1


def test_pattern_search_blocks_no_requests(
    sqlite_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = sqlite_server
    search, searched = PolicySearch.search, []

    def noting(self: PolicySearch, run_id: int, lines: Sequence[str]) -> list[Match]:
        searched.append((lines[0], threading.get_ident()))
        return search(self, run_id, lines)

    monkeypatch.setattr(PolicySearch, "search", noting)
    server.submit(log_policies=[{"name": "found", "pattern": "fatal"}])
    server.add_agent()
    spec = server.begin()
    server.log(spec.run_id, 0, "fatal in the log")
    server.exit(spec.run_id, 1, "failed", tail="fatal in its tail")
    assert server.trial()["labels"] == ["found"]
    assert [line for line, _ in searched] == ["fatal in the log", "fatal in its tail"]
    assert server.http.portal is not None
    busy = {
        server.write(lambda _work: threading.get_ident()),
        server.http.portal.call(threading.get_ident),
    }
    assert len(busy) == 2
    assert not [line for line, thread in searched if thread in busy]


def test_nonlinear_pattern_is_rejected_at_submit(
    sqlite_server: Server,
) -> None:
    policies = [{"pattern": r"(\w+) \1"}]
    response = sqlite_server.try_submit(log_policies=policies)
    assert response.status_code == 422
    problem = response.json()["error"]["problems"][0]
    assert problem.startswith(r"log_policies[0].pattern: must be a regular expression that RE2")
    assert "backreferences" in problem


def test_stored_invalid_pattern_is_ignored(
    sqlite_server: Server,
) -> None:
    server = sqlite_server
    server.submit(log_policies=[{"name": "old", "pattern": "x"}, {"name": "b", "pattern": "fatal"}])
    config = json.loads(server.sql("SELECT config FROM experiments")[0][0])
    config["log_policies"][0]["pattern"] = "(?<!not )x"
    server.execute("UPDATE experiments SET config = :config", config=json.dumps(config))
    server.services.orchestrator.configs.configs.clear()
    server.add_agent()
    spec = server.begin()
    server.log(spec.run_id, 0, "x", "fatal")
    assert server.trial()["labels"] == ["b"]
    server.exit(spec.run_id, -9)
    assert server.trial()["restarts"] == 1


def test_resent_lines_are_searched_once(server: Server) -> None:
    server.submit(log_policies=[{"name": "late", "pattern": "fatal", "action": "exclude_node"}])
    server.add_agent(name="first")
    spec = server.begin()
    server.log(spec.run_id, 0, "fatal")
    server.execute("UPDATE trials SET excluded = '[]', labels = '[]'")
    assert server.log(spec.run_id, 0, "fatal", "fine") == 2
    assert server.trial()["labels"] == []
    assert server.log(spec.run_id, 0, "fatal", "fine", "fatal again") == 3
    assert server.trial()["labels"] == ["late"]
