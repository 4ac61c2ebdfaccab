"""The page of an installation with several projects."""

from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from tests.server.access.test_users import add_user
from tests.server.helpers import Server
from tests.server.processes import played
from tests.web.conftest import Watched

pytestmark = [pytest.mark.browser, pytest.mark.processes]


def login_link(server: Server, token: str) -> str:
    """Return a one-time link of a user."""
    own = server.http.headers["Authorization"]
    server.http.headers["Authorization"] = f"Bearer {token}"
    try:
        return str(server.http.base_url) + str(server.post("/login-links")["url"])
    finally:
        server.http.headers["Authorization"] = own


def test_project_list_leads_to_experiments(tmp_path: Path, chromium: Browser) -> None:
    with played(tmp_path) as (_, server):
        base = str(server.http.base_url)
        server.submit(name="digits")
        contexts = [chromium.new_context() for _ in range(2)]
        first, second = (Watched(context.new_page(), base) for context in contexts)
        for watched in (first, second):
            watched.watch()
        page = first.page
        page.goto(login_link(server, server.token))
        expect(page.get_by_role("link", name="digits")).to_be_visible()
        for text in ("Projects", "project", "All projects"):  # a single project is not shown
            expect(page.get_by_text(text, exact=True)).to_have_count(0)

        server.post("/projects", {"name": "vision", "description": "Image models"})
        server.submit(name="flowers", project="vision")
        page.goto(f"{base}/#/")
        page.reload()
        row = page.get_by_role("row", name="vision")
        expect(row).to_contain_text("Image models")
        row.get_by_role("button", name="edit").click()
        page.get_by_role("dialog").get_by_label("Notes").fill("ask ann")
        page.get_by_role("dialog").get_by_role("button", name="save").click()
        expect(page.get_by_role("dialog")).to_have_count(0)
        expect(row.get_by_text("Notes")).to_be_visible()
        assert server.get("/projects/vision")["project"]["notes"] == "ask ann"
        row.get_by_role("link", name="vision").click()
        expect(page.get_by_role("heading", name="vision")).to_be_visible()
        expect(page.get_by_role("link", name="flowers")).to_be_visible()
        expect(page.get_by_role("link", name="digits")).to_have_count(0)
        page.get_by_role("link", name="flowers").click()
        expect(page.locator("dl.facts")).to_contain_text("projectvision")

        page.get_by_role("link", name="Experiments", exact=True).click()
        page.get_by_label("experiment 1", exact=True).check()
        page.get_by_role("button", name="Move to project").click()
        page.get_by_role("dialog").get_by_label("project").select_option("vision")
        page.get_by_role("dialog").get_by_role("button", name="move").click()
        expect(page.get_by_role("row", name="digits")).to_contain_text("vision")
        page.get_by_role("link", name="Projects", exact=True).click()
        row.get_by_role("button", name="archive").click()
        page.get_by_role("dialog").get_by_role("button", name="archive").click()
        expect(row).to_have_count(0)
        page.get_by_label("Show archived (1)").check()
        expect(row).to_contain_text("archived")

        add_user(server, "ann", "member")
        server.request("PATCH", "/projects/vision", json={"archived": False})
        page.reload()
        row.get_by_role("button", name="members").click()
        dialog = page.get_by_role("dialog")
        dialog.get_by_label("new member").select_option("ann")
        dialog.get_by_role("button", name="add").click()
        expect(dialog.get_by_role("row", name="ann")).to_be_visible()
        dialog.get_by_role("button", name="restrict to members").click()
        expect(dialog).to_contain_text("Only these users")
        dialog.get_by_role("button", name="Close").click()
        expect(row).to_contain_text("members only")

        viewer = add_user(server, "vic", "viewer")
        other = second.page
        other.goto(login_link(server, viewer))
        expect(other.get_by_role("link", name="Projects")).to_have_count(0)  # sees a single one
        expect(other.get_by_text("No experiments yet.")).to_be_visible()
        other.goto(f"{base}/#/projects")
        row = other.get_by_role("row", name="default")
        expect(row.get_by_role("button", name="edit")).to_be_disabled()
        expect(other.get_by_role("button", name="new project")).to_be_disabled()
        assert first.faults == second.faults == []
        for context in contexts:
            context.close()
