"""Charts: pin, download, prefixes of metrics, epochs and metrics as x axis, nearest curves."""

import csv
import re
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest
from playwright.sync_api import Page, expect

from tests.server.helpers import metrics
from tests.waiting import until
from tests.web.conftest import Watched
from tests.web.drawings import chart, hover, mark, near, pixels
from tests.web.stage import Stage
from tests.web.test_search import away

pytestmark = [pytest.mark.browser, pytest.mark.processes]

TRIALS = 7
STEPS = 20
RATES = [round(0.01 * n, 2) for n in range(1, TRIALS + 1)]


@pytest.fixture(scope="module")
def grouped(stage: Stage) -> Iterator[int]:
    """Run a search with epochs and with metrics that have a prefix."""
    played = stage.played
    space = {
        "deepspeed_config": "ds_config.json",
        "optimizer": {"lr": {"type": "categorical", "vals": RATES}},
        "width": {"type": "categorical", "vals": [8]},
    }
    searcher = {"name": "grid", "metric": "loss", "max_length": STEPS}
    experiment_id = int(
        played.submit(name="grouped", searcher=searcher, hyperparameters=space)["id"]
    )
    for final, item in enumerate(played.wait_for_runs(TRIALS)):
        played.post(f"/runs/{item.run_id}/started", {})
        records = [
            metrics(
                "training",
                step,
                loss=final + 1 / step,
                epochs=step / 10,
                **{
                    "optimizer/lr": 0.1 / step,
                    "optimizer/norm": float(step),
                    "data/rows": step * 8,
                },
            )
            for step in range(1, STEPS + 1)
        ]
        validations = [metrics("validation", step, loss=final + 1.0 / step) for step in (10, 20)]
        played.send(item.run_id, 1, [*records, *validations])
        played.exit(item.run_id, 0)
    yield experiment_id
    away(stage, experiment_id)


def titles(page: Page) -> list[str]:
    """Return the titles of the charts in their order."""
    return page.locator(".chart figcaption > span:first-child").all_inner_texts()


def test_charts_are_grouped_by_prefix(grouped: int, spectator: Watched) -> None:
    page = spectator.show(f"#/experiments/{grouped}")
    section = page.locator("details.group")
    expect(section.locator("summary")).to_have_text(["data/ 1 chart", "optimizer/ 2 charts"])
    expect(section.nth(1).get_by_role("figure")).to_have_count(2)
    section.nth(1).locator("summary").click()
    expect(section.nth(1).get_by_role("figure")).to_have_count(0)


def test_pinned_charts_come_first(grouped: int, spectator: Watched) -> None:
    page = spectator.show(f"#/experiments/{grouped}")
    expect(chart(page, "training: optimizer/norm")).to_be_visible()
    assert titles(page)[0] == "training: loss"
    page.get_by_role("button", name="pin training: optimizer/norm").click()
    until("it is the first", lambda: titles(page)[0], "training: optimizer/norm".__eq__)
    page.reload()
    pin = page.get_by_role("button", name="pin training: optimizer/norm")
    expect(pin).to_have_attribute("aria-pressed", "true")
    assert titles(page)[0] == "training: optimizer/norm"
    pin.click()
    until("it is not the first", lambda: titles(page)[0], "training: loss".__eq__)
    assert "pinned" not in page.url


def test_x_axis_can_be_epoch_or_metric(grouped: int, spectator: Watched) -> None:
    page = spectator.show(f"#/experiments/{grouped}?metric=loss")
    loss = chart(page, "training: loss")
    expect(loss).to_have_accessible_name(re.compile("to batch 20$"))
    choice = page.get_by_label("x axis", exact=True)
    choice.select_option(label="X axis: epoch")
    expect(loss).to_have_accessible_name(re.compile("140 points to epoch 2$"))
    expect(chart(page, "validation: loss")).to_have_accessible_name(
        re.compile("14 points to epoch 2$")
    )
    expect(hover(loss)).to_contain_text(re.compile(r"epoch 1(\.\d)? · batch 1\d"))
    mark(loss, 0.3, 0.6)
    expect(
        page.get_by_role("button", name=re.compile(r"epoch 0\.\d+ to epoch 1\.\d+"))
    ).to_be_visible()
    page.reload()
    expect(choice).to_have_value("training: epochs")
    choice.select_option(label="X axis: training: optimizer/lr")
    expect(loss).to_have_accessible_name(re.compile("140 points to training: optimizer/lr 0.1$"))
    page.get_by_role("button", name="validation", exact=True).click()
    expect(chart(page, "validation: loss")).to_have_accessible_name(
        re.compile("14 points to .* 0.01$")
    )
    expect(chart(page, "training: loss")).to_have_count(0)


def test_mouse_lists_five_nearest_curves(grouped: int, spectator: Watched) -> None:
    page = spectator.show(f"#/experiments/{grouped}?metric=loss")
    loss = chart(page, "training: loss")
    expect(loss).to_be_visible()
    readout = hover(loss, 0.5, 0.9)
    near_mouse = loss.locator(".nearest li")
    expect(near_mouse).to_have_count(5)
    values = [float(text.split()[0]) for text in near_mouse.all_inner_texts()]
    assert values == sorted(values, reverse=True)
    assert max(values) < 5, "the lower curves are nearer to the mouse"
    expect(readout).to_contain_text(re.compile(r"^\d\.\d+ · batch \d+ · trial \d+ "))
    page.mouse.move(1, 1)
    expect(near_mouse).to_have_count(0)


def test_legend_shows_what_differs(stage: Stage, grouped: int, spectator: Watched) -> None:
    ids = stage.trials(grouped)
    page = spectator.show(f"#/experiments/{grouped}/curves/{ids[0]},{ids[1]}")
    entries = page.get_by_label("trials").get_by_role("listitem")
    expect(entries).to_have_count(2)
    for text in entries.all_inner_texts():
        assert "lr" in text
        assert "width" not in text


def test_twelve_curves_have_twelve_colours(stage: Stage, spectator: Watched) -> None:
    ids = stage.trials(stage.sweep)
    some = [*ids[:6], *ids[12:18]]  # places with the same colours
    page = spectator.show(f"#/experiments/{stage.sweep}/curves/{','.join(map(str, some))}")
    lines = page.locator(".legend line")
    expect(lines).to_have_count(12)
    colors = [line.get_attribute("stroke") or "" for line in lines.all()]
    assert len(set(colors)) == 12
    until("the last is drawn", lambda: pixels(chart(page, "training: loss"), near(colors[-1])),
          lambda count: count > 20)  # fmt: skip


def test_chart_downloads(grouped: int, spectator: Watched, tmp_path: Path) -> None:
    page = spectator.show(f"#/experiments/{grouped}?metric=loss")
    loss = chart(page, "training: loss")
    page.get_by_role("button", name="download training: loss").click()
    files = {}
    for kind in ("PNG", "SVG", "CSV"):
        with page.expect_download() as started:
            loss.get_by_role("button", name=kind, exact=True).click()
        assert started.value.suggested_filename == f"training-loss.{kind.lower()}"
        files[kind] = tmp_path / started.value.suggested_filename
        started.value.save_as(files[kind])
    assert files["PNG"].read_bytes().startswith(b"\x89PNG")
    drawing = ElementTree.fromstring(files["SVG"].read_text())
    names = [text.text or "" for text in drawing.iter("{http://www.w3.org/2000/svg}text")]
    assert "training: loss" in names
    assert sum(name.startswith("trial ") for name in names) == TRIALS
    rows = list(csv.DictReader(files["CSV"].read_text().splitlines()))
    assert [int(row["batch"]) for row in rows] == list(range(1, STEPS + 1))
    best = next(name for name in rows[0] if name.startswith("trial "))
    assert float(rows[1][best]) % 1 == pytest.approx(0.5)
