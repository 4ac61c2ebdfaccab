"""Texts of other users and of trials are shown as text: no view runs or loads them."""

import time
from pathlib import Path

import msgspec
import pytest
from playwright.sync_api import Browser, expect

from tests.server.helpers import checkpoint, metrics, validation
from tests.server.processes import played
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


def test_no_view_runs_texts_of_others(tmp_path: Path, chromium: Browser) -> None:
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
        assert [fault for fault in watched.faults if "status of 404" not in fault] == []
