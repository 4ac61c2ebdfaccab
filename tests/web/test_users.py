"""The page of two users: owners, own experiments, users and tokens."""

from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from tests.server.access.test_users import add_user
from tests.server.processes import played
from tests.web.conftest import Watched

pytestmark = [pytest.mark.browser, pytest.mark.processes]


def test_page_of_administrator_and_viewer(tmp_path: Path, chromium: Browser) -> None:
    with played(tmp_path) as (_, server):
        base = str(server.http.base_url)
        server.submit(name="of admin")
        contexts = [chromium.new_context() for _ in range(2)]
        admin, viewer = (Watched(context.new_page(), base) for context in contexts)
        for watched in (admin, viewer):
            watched.watch()
        page = admin.page
        page.goto(base + server.post("/login-links")["url"])
        expect(page.get_by_role("link", name="of admin")).to_be_visible()
        for text in ("owner", "Mine", "Users"):  # a single user notices nothing
            expect(page.get_by_text(text, exact=True)).to_have_count(0)
        admin_token = server.http.headers["Authorization"]
        secret = add_user(server, "vic", "viewer", 3600.0)
        server.http.headers["Authorization"] = f"Bearer {secret}"
        link = server.post("/login-links")["url"]
        server.http.headers["Authorization"] = admin_token

        page.reload()
        expect(page.get_by_role("row", name="of admin")).to_contain_text("admin")
        page.get_by_label("Mine").check()
        expect(page.get_by_role("link", name="of admin")).to_be_visible()
        page.get_by_role("link", name="Users").click()
        expect(page.get_by_role("row", name="vic")).to_have_count(2)  # the user and the token
        expect(page.locator("body")).not_to_contain_text(secret[:12])

        other = viewer.page
        other.goto(base + link)
        expect(other.get_by_role("row", name="of admin")).to_be_visible()
        other.get_by_label("Mine").check()
        expect(other.get_by_text("No matches.")).to_be_visible()
        other.get_by_role("link", name="Users").click()
        expect(other.get_by_role("row", name="you")).to_contain_text("vic")
        expect(other.get_by_role("button", name="deactivate")).to_have_count(0)
        other.goto(f"{base}/#/experiments/1")
        for name in ("pause", "fork", "edit", "kill"):
            expect(other.get_by_role("button", name=name)).to_be_disabled()
        reason = other.get_by_title("needs the role member; yours is viewer")
        expect(reason.get_by_role("button", name="pause")).to_be_visible()

        page.get_by_label("role of vic").select_option("member")
        page.get_by_role("dialog").get_by_role("button", name="change").click()
        expect(page.get_by_role("dialog")).to_have_count(0)
        assert server.get("/users")["users"][1]["role"] == "member"
        server.request("PUT", "/quotas/user/*", json={"max_slots": 4})
        other.goto(f"{base}/#/cluster")
        other.reload()  # the role has changed
        other.get_by_role("button", name="request a larger quota").click()
        form = other.get_by_role("dialog")
        form.get_by_label("Slots").fill("6")
        form.get_by_label("Reason").fill("a large model")
        form.get_by_role("button", name="request").click()
        line = other.get_by_role("row", name="a large model")
        expect(line.get_by_role("button", name="approve")).to_be_disabled()
        page.get_by_role("link", name="Cluster").click()
        line = page.get_by_role("row", name="a large model")
        line.get_by_role("button", name="approve").click()
        page.get_by_role("dialog").get_by_role("button", name="approve").click()
        expect(line).to_contain_text("approved by admin")
        expect(page.get_by_role("row", name="user:vic")).to_contain_text("6")

        page.get_by_role("link", name="Users").click()
        page.get_by_role("button", name="revoke").click()
        page.get_by_role("dialog").get_by_role("button", name="revoke").click()
        expect(page.get_by_text("No tokens.")).to_be_visible()
        other.reload()
        expect(other.get_by_text("Not signed in.")).to_be_visible()
        assert admin.faults == []
        for context in contexts:
            context.close()
