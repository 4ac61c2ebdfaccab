"""Comparison of experiments: one chart per metric, and their different settings."""

import re

import pytest
from playwright.sync_api import Locator, Page, expect

from tests.waiting import until
from tests.web.conftest import Watched
from tests.web.drawings import chart, near, pixels
from tests.web.stage import Stage

pytestmark = [pytest.mark.browser, pytest.mark.processes]

STROKE = "stroke"


def legend(page: Page) -> list[str]:
    return page.get_by_label("trials", exact=True).get_by_role("listitem").all_inner_texts()


def experiments(page: Page) -> Locator:
    """Find the table of the compared experiments."""
    return page.get_by_role("table").filter(has=page.get_by_role("columnheader", name="duration"))


def test_compare_selected_experiments(stage: Stage, spectator: Watched) -> None:
    page = spectator.show("#/")
    page.get_by_label(f"experiment {stage.sweep}", exact=True).check()
    expect(page.get_by_role("link", name=re.compile("^compare"))).to_have_count(0)
    page.get_by_label(f"experiment {stage.empty}", exact=True).check()
    page.get_by_role("link", name="compare 2").click()

    loss = chart(page, "training: loss")
    expect(loss).to_have_accessible_name(re.compile(": 2 curves, 21 points to batch 20$"))
    (best,) = stage.best(1)
    assert legend(page)[0].split() == [str(stage.sweep), "sweep", "trial", str(best)]
    colors = [line.get_attribute(STROKE) or "" for line in page.locator(".legend line").all()]
    assert len(set(colors)) == 2
    until("both are drawn", lambda: [pixels(loss, near(color)) for color in colors],
          lambda drawn: min(drawn) > 10)  # fmt: skip

    table = experiments(page)
    expect(table.get_by_role("row").nth(1)).to_contain_text("completed")
    expect(table.get_by_role("row").nth(2)).to_contain_text("completed, no result")
    raw = table.get_by_role("row").nth(1).get_by_role("link", name="REST")
    expect(raw).to_have_attribute("href", f"/api/v1/experiments/{stage.sweep}")
    setting = page.get_by_role("row").filter(has_text="searcher.name")
    expect(setting).to_contain_text("grid")
    expect(setting).to_contain_text("single")
    rate = page.get_by_role("row").filter(has_text="hyperparameters.optimizer.lr")
    best_rate = stage.played.trial(best)["hparams"]["optimizer"]["lr"]
    expect(rate).to_contain_text(str(best_rate))
    expect(rate).to_contain_text("not set")
    expect(page.get_by_role("row").filter(has_text="deepspeed_config")).to_have_count(0)

    page.get_by_label("trials of each experiment").select_option("3")
    expect(loss).to_have_accessible_name(re.compile(": 4 curves, "))
    page.reload()
    expect(loss).to_have_accessible_name(re.compile(": 4 curves, "))
    assert legend(page)[0].split()[-1] == str(best)


def test_compare_add_remove_and_deleted(stage: Stage, spectator: Watched) -> None:
    page = spectator.show(f"#/compare/{stage.sweep}")
    expect(page.get_by_text("Select at least two")).to_be_visible()
    page.get_by_label("ID of another experiment").fill(str(stage.long))
    page.get_by_role("button", name="add experiment").click()
    rows = experiments(page).locator("tbody tr")
    expect(rows).to_have_count(2)
    expect(page.get_by_text("Select at least two")).to_have_count(0)
    page.get_by_label(f"remove experiment {stage.sweep}").click()
    expect(rows).to_have_count(1)
    expect(rows).to_contain_text("long")
    spectator.show(f"#/compare/{stage.long},99999")
    expect(page.get_by_role("alert")).to_contain_text("there is no experiment 99999")
    expect(rows).to_have_count(1)
    spectator.faults.clear()  # the browser logs the 404
