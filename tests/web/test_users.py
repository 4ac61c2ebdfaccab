"""The page of several users: owners, users, tokens, share links, views, comments, groups."""

import time
from pathlib import Path

import msgspec
import pytest
from playwright.sync_api import Browser, Page, Route, expect

from tests.server.access.test_users import add_user
from tests.server.helpers import checkpoint, metrics, validation
from tests.server.processes import played
from tests.waiting import until
from tests.web.conftest import Watched
from zerolab.contract.messages import AlertRecord
from zerolab.storage.store import CheckpointStore

pytestmark = [pytest.mark.browser, pytest.mark.processes]

HTML = "<img src=hostile onerror=document.title='hostile'>"
LINK = "javascript:document.title='hostile'"
VIEWS = (
    "/", "/experiments", "/experiments/1", "/experiments/1/trials", "/experiments/1/search",
    "/experiments/1/hyperparameters", "/experiments/1/media", "/experiments/1/checkpoints",
    "/experiments/1/logs", "/experiments/1/configuration", "/experiments/1/code", "/trials/1",
    "/trials/1/hyperparameters", "/trials/1/checkpoints", "/trials/1/logs", "/trials/1/runs",
    "/trials/1/engine", "/compare/1,2", "/cluster", "/models", "/models/model", "/users",
)  # fmt: skip


def _check_administration(page: Page) -> None:
    """Create and delete a channel, and read the audit log."""
    page.get_by_role("button", name="new channel").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_role("textbox", name="Name").fill("team")
    dialog.get_by_label("URL").fill("https://1.1.1.1/hook")
    dialog.get_by_label("All of the user").fill("vic")
    dialog.get_by_role("button", name="create").click()
    expect(dialog).to_contain_text("not shown again")
    dialog.get_by_role("button", name="Close").click()
    row = page.get_by_role("row", name="team webhook")
    expect(row).to_contain_text("of vic")
    row.get_by_role("button", name="delete").click()
    dialog.get_by_role("button", name="delete").click()
    expect(row).to_have_count(0)
    expect(page.get_by_text("No channels.")).to_be_visible()
    expect(page.get_by_role("row", name="POST /users/vic/tokens")).to_be_visible()
    page.get_by_label("changes of").select_option("vic")
    expect(page.get_by_role("row", name="vic 1 POST /login-links")).to_be_visible()
    expect(page.get_by_role("row", name="POST /users/vic/tokens")).to_have_count(0)


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
        page.get_by_role("link", name="Admin", exact=True).click()
        expect(page.get_by_role("row", name="vic viewer")).to_be_visible()
        _check_administration(page)
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

        page.get_by_role("link", name="Admin", exact=True).click()
        page.get_by_role("button", name="revoke").click()
        page.get_by_role("dialog").get_by_role("button", name="revoke").click()
        expect(page.get_by_text("No tokens.")).to_be_visible()
        other.reload()
        expect(other.get_by_text("Not signed in.")).to_be_visible()
        assert admin.faults == []
        for context in contexts:
            context.close()


def test_team_shares_results(tmp_path: Path, chromium: Browser) -> None:
    """One server and two browsers, since their start takes most of the time."""
    with played(tmp_path) as (_, server):
        base = str(server.http.base_url)
        server.add_agent(2)
        for name, rate in (("first", 0.1), ("second", 0.2)):
            server.submit(name=name, hyperparameters={"lr": rate})
        for position, item in enumerate(server.wait_for_runs(2)):
            server.post(f"/runs/{item.run_id}/started", {})
            server.send(item.run_id, 1, [validation(10, 0.5 - 0.1 * position)])
            server.exit(item.run_id, 0)
        add_user(server, "ann", "member")
        contexts = [chromium.new_context() for _ in range(2)]
        admin, visitor = (Watched(context.new_page(), base) for context in contexts)
        admin.watch()
        page = admin.page
        page.goto(base + server.post("/login-links")["url"])
        check_groups_and_views(page)
        check_comments(page)
        link = create_link(page)
        assert link.startswith(f"{base}/#/shared/zls_")
        check_visitor(visitor.page, link, base)
        server.http.delete("/api/v1/shares/1")
        visitor.page.reload()
        expect(visitor.page.get_by_text("Not signed in.")).to_be_visible()
        visitor.page.goto(f"{base}/healthz")
        visitor.page.goto(link)
        expect(visitor.page.get_by_role("alert")).to_contain_text("ask for a new one")
        assert admin.faults == []
        for context in contexts:
            context.close()


def check_groups_and_views(page: Page) -> None:
    """Group the list, save it as a view with a column, and open the view."""
    page.get_by_label("group by").select_option(label="By lr")
    row = page.get_by_role("row", name="0.2")
    expect(row).to_contain_text("0.4")
    expect(row.get_by_role("link", name="2 second")).to_be_visible()
    page.get_by_label("group by").select_option(label="By user")
    expect(page.get_by_role("row", name="admin")).to_contain_text("2 second")
    page.get_by_text("columns", exact=True).click()
    page.get_by_label("column searcher").check()
    page.get_by_text("views", exact=True).click()
    page.get_by_role("button", name="save view").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Name").fill("by user")
    dialog.get_by_label("Show to all users").check()
    dialog.get_by_role("button", name="save", exact=True).click()
    expect(dialog).to_have_count(0)
    page.evaluate("localStorage.clear()")
    page.goto("about:blank")
    page.go_back()
    page.get_by_label("group by").select_option("")
    expect(page.get_by_role("columnheader", name="searcher")).to_have_count(0)
    page.get_by_text("views", exact=True).click()
    page.get_by_role("link", name="by user").click()
    expect(page.get_by_role("row", name="admin")).to_contain_text("2 second")
    page.get_by_label("group by").select_option("")
    expect(page.get_by_role("columnheader", name="searcher")).to_be_visible()
    page.get_by_role("button", name="rename").click()
    page.get_by_role("dialog").get_by_label("Name").fill("mine")
    page.get_by_role("dialog").get_by_role("button", name="rename").click()
    expect(page.get_by_role("link", name="mine")).to_be_visible()
    page.get_by_role("group", name="views").get_by_role("button", name="delete").click()
    page.get_by_role("dialog").get_by_role("button", name="delete").click()
    expect(page.get_by_text("No saved views.")).to_be_visible()


def check_comments(page: Page) -> None:
    """Write, change and delete comments."""
    page.get_by_role("link", name="first").click()
    # A metric or a fact that appears above moves the button away from a pressed mouse.
    expect(page.get_by_role("region", name="metrics that were reported once")).to_be_visible()
    expect(page.locator(".facts")).to_contain_text("has no checkpoint")
    section = page.get_by_label("comments")
    field = section.get_by_label("new comment")
    field.fill("<b>plain</b>\ntext")
    held: list[Route] = []
    page.route("**/comments", lambda route: held.append(route))  # noqa: PLW0108 - no builtin
    button = section.get_by_role("button", name="comment", exact=True)
    button.click()
    expect(button).to_be_disabled()  # a second click would add a second comment
    expect(field).not_to_be_editable()  # the text is cleared after the response
    until("the comment is sent", lambda: page.title() and held)
    held.pop().continue_()
    page.unroute("**/comments")
    expect(section.get_by_text("<b>plain</b>")).to_be_visible()
    expect(field).to_have_value("")
    section.get_by_role("button", name="edit").click()
    section.get_by_label("comment 1", exact=True).get_by_role("textbox").fill("changed")
    section.get_by_role("button", name="save").click()
    expect(section.get_by_text("changed")).to_be_visible()
    expect(section.get_by_text(", edited")).to_be_visible()


def create_link(page: Page) -> str:
    """Create a link to the experiment of the page, and return it."""
    page.get_by_role("button", name="share").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Purpose").fill("review")
    dialog.get_by_role("button", name="create link").click()
    link = dialog.get_by_label("link", exact=True).input_value()
    expect(dialog.get_by_text("Link 1 review by admin")).to_be_visible()
    dialog.get_by_role("button", name="Close").click()
    return link


def check_visitor(page: Page, link: str, base: str) -> None:
    """Open the link without an account: one experiment, and nothing else."""
    page.goto(link)
    expect(page.get_by_role("heading", name="first")).to_be_visible()
    expect(page.get_by_text("Shared results, read-only")).to_be_visible()
    assert "zls_" not in page.url
    tabs = page.get_by_label("views of this experiment").get_by_role("link")
    expect(tabs.first).to_have_text("curves")
    for name in ("logs", "code", "configuration", "checkpoints", "Cluster", "Users"):
        expect(page.get_by_role("link", name=name, exact=True)).to_have_count(0)
    for name in ("share", "delete", "fork", "Sign out", "comment"):
        expect(page.get_by_role("button", name=name)).to_have_count(0)
    page.goto(f"{base}/#/trials/1")
    expect(page.get_by_role("heading", name="of first")).to_be_visible()
    page.goto(f"{base}/#/experiments")
    expect(page.get_by_role("link", name="first")).to_be_visible()
    expect(page.get_by_role("link", name="second")).to_have_count(0)
    page.goto(f"{base}/#/experiments/2")
    expect(page.get_by_role("alert")).to_contain_text("this share link does not show experiment 2")
    expect(page.get_by_text("second")).to_have_count(0)


def test_no_view_runs_texts_of_others(tmp_path: Path, chromium: Browser) -> None:
    """Texts of other users and of trials are shown as text: none is run or loaded."""
    with played(tmp_path) as (_, server):
        for _ in range(2):
            server.submit(
                name=HTML, description=HTML, labels=[HTML, LINK],
                hyperparameters={HTML: HTML, "deepspeed_config": "ds_config.json"},
            )  # fmt: skip
        server.request("PATCH", "/experiments/1", json={"notes": f"{HTML} {LINK}"})
        server.post("/experiments/1/comments", {"text": f"{HTML} [a]({LINK})"})
        server.post("/models", {"name": "model", "description": HTML})
        server.add_agent(1, HTML)
        spec = server.begin()
        store = CheckpointStore.of_run(spec)
        record = checkpoint(10)
        path = store.begin(record.uuid) / HTML
        path.write_text(HTML)
        stored = store.commit(record.uuid, 10, {HTML: HTML})
        server.report(
            spec.run_id,
            metrics("training", 5, **{HTML: 1.0}),
            metrics("training", 10, **{HTML: 2.0}),
            validation(10, 0.5, **{HTML: 1.0}),
            msgspec.structs.replace(record, resources=stored.resources, metadata={HTML: HTML}),
            AlertRecord(HTML, HTML, time.time()),
        )
        server.post("/models/model/versions", {"checkpoint": record.uuid, "notes": HTML})
        server.log(spec.run_id, 0, HTML, f"\x1b[31m{HTML}\x1b[0m", LINK)
        server.exit(spec.run_id, 1, HTML)
        with chromium.new_context() as context:
            watched = Watched(context.new_page(), str(server.http.base_url))
            page = watched.page
            watched.watch()
            page.goto(watched.url + server.post("/login-links")["url"])
            expect(page.get_by_role("link", name=HTML).first).to_be_visible()
            seen = 0
            for view in VIEWS:
                watched.show(f"#{view}")
                page.wait_for_load_state("networkidle")
                expect(page.get_by_text("Loading…")).to_have_count(0)
                seen += page.get_by_text("hostile").count()
                assert page.locator("img[src=hostile], a[href^='javascript:']").count() == 0, view
                assert page.title() != "hostile", view
            assert seen > len(VIEWS)
        assert watched.faults == []
