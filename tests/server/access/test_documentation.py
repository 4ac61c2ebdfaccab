"""The documentation that the server shows at /docs."""

from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from zeroserver.app import create_app
from zeroserver.settings import Settings


def browser(home: Path, docs: Path) -> TestClient:
    """Return a client without a token; the server's startup does not run."""
    return TestClient(create_app(Settings(home=home), docs=docs), "http://127.0.0.1")


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A documentation of two pages and a script, beside a file that is not part of it."""
    folder = tmp_path / "docs"
    (folder / "reference").mkdir(parents=True)
    (folder / "index.html").write_text("<title>Zerolab</title>")
    (folder / "404.html").write_text("No such page")
    (folder / "reference" / "index.html").write_text("Reference")
    (folder / "search.js").write_text("'use strict'")
    (tmp_path / "secret").write_text("root:")
    return folder


def test_docs_need_no_token(tmp_path: Path, site: Path) -> None:
    http = browser(tmp_path / "home", site)
    home = http.get("/docs")
    assert (home.url.path, home.status_code, home.text) == ("/docs/", 200, "<title>Zerolab</title>")
    assert home.history[0].headers["Location"] == "/docs/"  # valid behind any proxy
    assert http.get("/docs/reference/").text == "Reference"
    assert http.get("/api/v1/info").status_code == 401
    missing = http.get("/docs/nothing/")
    assert (missing.status_code, missing.text) == (404, "No such page")


def test_docs_have_type_cache_and_policy(tmp_path: Path, site: Path) -> None:
    http = browser(tmp_path / "home", site)
    script = http.get("/docs/search.js")
    assert script.headers["Content-Type"].startswith("text/javascript")
    assert script.headers["Cache-Control"] == "private, no-cache"
    assert "unsafe-inline" not in script.headers["Content-Security-Policy"]
    same = http.get("/docs/search.js", headers={"If-None-Match": script.headers["ETag"]})
    assert same.status_code == 304
    origin = {"Origin": str(http.base_url)}
    assert http.post("/docs/search.js", headers=origin).status_code == 405
    assert http.post("/docs/search.js").status_code == 403


@pytest.mark.parametrize(
    "path", ["../secret", "..%2fsecret", "%2e%2e/secret", "reference/..%2f..%2fsecret"]
)
def test_docs_stay_in_their_folder(tmp_path: Path, site: Path, path: str) -> None:
    response = browser(tmp_path / "home", site).get(f"/docs/{path}")
    assert response.status_code in {401, 404}
    assert "root:" not in response.text


def test_docs_that_are_not_built(tmp_path: Path) -> None:
    response = browser(tmp_path / "home", tmp_path / "none").get("/docs/")
    assert response.status_code == 404
    assert "run <code>make docs</code>" in response.text
