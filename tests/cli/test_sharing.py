"""Commands of share links, saved views, comments and groups."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.server.processes import played
from zerolab.cli.main import app

pytestmark = pytest.mark.processes


def test_commands_of_shared_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with played(tmp_path) as (live, server):
        monkeypatch.setenv("ZEROLAB_MASTER", live.url)
        monkeypatch.setenv("ZEROLAB_TOKEN", live.token)
        server.submit(name="first")

        def run(*words: str) -> str:
            done = CliRunner().invoke(app, list(words))
            assert done.exit_code == 0, done.output
            return done.output

        def problem(*words: str) -> str:
            return str(CliRunner().invoke(app, list(words)).exception)

        server.post("/views", {"name": "best runs", "path": "/?group=user"})
        created = run("share", "create", "1", "--view", "best runs", "--expires", "2h")
        assert f"{live.url}/#/shared/zls_" in created
        assert server.get("/shares")["shares"][0]["path"] == "/?group=user"
        assert "--expires: must be" in problem("share", "create", "1", "--expires", "soon")
        assert "no view 'other'" in problem("share", "create", "1", "--view", "other")
        assert "zls_" not in run("share", "list")
        assert "is revoked" in run("share", "revoke", "1")
        assert "no share link 1" in problem("share", "revoke", "1")

        assert "best runs" in run("view", "list")
        run("view", "delete", "best runs")
        assert server.get("/views")["views"] == []

        assert "text: " in problem("comment", "add", "1", "two\nlines \x1b[31m")
        assert run("comment", "add", "1", "two\nlines").strip() == "1"
        assert "    two\n    lines" in run("comment", "list", "1")

        assert "ACTIVE" in run("experiment", "list", "--group-by", "state")
        assert "by: must be one of" in problem("experiment", "list", "--group-by", "x")
