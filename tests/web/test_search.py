"""Search views: table of trials, hyperparameters, progress and cost."""

import gzip
import json
import random
import re
import sqlite3
import time
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Locator, Page, expect

from tests.long_names import CALLED
from tests.server.helpers import metrics, validation
from tests.waiting import until
from tests.web.conftest import Watched
from tests.web.drawings import near, pixels
from tests.web.stage import TRIALS, Stage
from zeroserver.app import STATIC

pytestmark = [pytest.mark.browser, pytest.mark.processes]

MANY = 10_000
LR = '[data-name="optimizer.lr"]'
NARROW = {"width": 400, "height": 800}


@pytest.fixture(scope="module")
def many(stage: Stage) -> Iterator[int]:
    """Insert an experiment of ten thousand trials into the database."""
    played = stage.played
    searcher = {"name": "random", "metric": "loss", "max_length": 20, "max_trials": MANY}
    space = {
        "deepspeed_config": "ds_config.json",
        "optimizer": {"lr": {"type": "log", "base": 10, "minval": -5, "maxval": -1}},
    }
    experiment = played.submit(
        activate=False, name="many", searcher=searcher, hyperparameters=space
    )
    yield _fill(stage, int(experiment["id"]))
    away(stage, int(experiment["id"]))


def away(stage: Stage, experiment_id: int) -> None:
    """Kill and delete an experiment, since other tests use the same server."""
    played = stage.played
    played.act("kill", experiment_id)
    for item in played.work():
        if item.spec.experiment_id == experiment_id:
            played.exit(item.run_id, 0)
    played.request("DELETE", f"/experiments/{experiment_id}")


def _fill(stage: Stage, experiment_id: int) -> int:
    chance = random.Random(1)
    trials = []
    for _ in range(MANY):
        hparams = {"optimizer": {"lr": 10 ** chance.uniform(-5, -1), "name": chance.choice("abc")}}
        trials.append((hparams, chance.random()))
    _insert(stage, experiment_id, trials)
    return experiment_id


def _insert(stage: Stage, experiment_id: int, trials: list[tuple[dict[str, Any], float]]) -> None:
    """Insert trials into the database; every tenth has failed."""
    rows = []
    for number, (hparams, loss) in enumerate(trials):
        state = "ERROR" if number % 10 == 0 else "COMPLETED"
        rows.append((experiment_id, 100 + number, state, json.dumps(hparams), loss, time.time()))
    columns = "experiment_id, request_id, state, hparams, best_validation, created_at"
    defaults = "restarts, waits, excluded, labels, seed, steps_completed, progress, searcher_steps"
    with sqlite3.connect(stage.server.home / "zerolab.db", timeout=60) as database:
        database.executemany(
            f"INSERT INTO trials ({columns}, {defaults}) "
            "VALUES (?, ?, ?, ?, ?, ?, 0, 0, '[]', '[]', 1, 20, 1.0, 20)",
            rows,
        )
        database.execute(
            "UPDATE experiments SET num_trials = "
            "(SELECT count(*) FROM trials WHERE experiment_id = ?) WHERE id = ?",
            (experiment_id, experiment_id),
        )


def figure(page: Page, name: str) -> Locator:
    return page.get_by_role("figure", name=name, exact=True)


def plot(page: Page, name: str) -> Locator:
    return figure(page, name).get_by_role("application")


def test_page_is_under_150_kb_compressed() -> None:
    sizes = [len(gzip.compress(file.read_bytes())) for file in (STATIC / "assets").iterdir()]
    assert 10_000 < sum(sizes) < 150_000


def test_ten_thousand_trials_sort_filter_and_scroll(
    stage: Stage, spectator: Watched, many: int
) -> None:
    page = spectator.show(f"#/experiments/{many}/trials?sort=hparams.optimizer.lr")
    rows = page.locator("tbody tr[aria-rowindex]")
    expect(rows.first).to_be_visible()
    assert rows.count() < 200, "only what is in sight is drawn"
    total = len(stage.played.get(f"/experiments/{many}/columns")["columns"]["id"])
    expect(page.get_by_role("status")).to_have_text(f"{total:,} trials")
    box = page.locator(".long")
    box.evaluate("element => element.scrollTop = element.scrollHeight / 2")
    expect(page.locator(f"tr[aria-rowindex='{total // 2}']")).to_be_visible()
    rates = [float(text) for text in page.locator(LR).all_inner_texts()]
    assert rates == sorted(rates)
    page.get_by_label("state").select_option(label="No result")
    expect(page.get_by_role("status")).to_have_text(f"1,000 of {total:,} trials")
    expect(page.locator("tbody .badge").first).to_have_text("error")


def test_long_names_are_shortened_with_tooltip(stage: Stage, spectator: Watched) -> None:
    experiment_id = int(stage.played.submit(activate=False, name="deep")["id"])
    same = {"deepspeed_config": "ds_config.json"}
    _insert(
        stage, experiment_id, [(same | dict.fromkeys(CALLED, loss), loss) for loss in (0.1, 0.2)]
    )
    page = spectator.show(f"#/experiments/{experiment_id}/trials")
    expect(page.get_by_role("columnheader", name="weight_decay")).to_be_visible()
    script = "each => [each.title || each.textContent, each.textContent]"
    heads = dict(page.evaluate(f"[...document.querySelectorAll('th button')].map({script})"))
    assert {name: heads.get(name) for name in CALLED} == CALLED
    page = spectator.show(f"#/experiments/{experiment_id}/hyperparameters")
    expect(plot(page, "parallel coordinates")).to_be_visible()
    script = "each => [each.firstChild.textContent, each.lastChild.textContent]"
    axes = dict(page.evaluate(f"[...document.querySelectorAll('.axes text.title')].map({script})"))
    assert axes.pop("best loss") == "best loss"
    assert len(axes) == 8
    for name, head in axes.items():
        begin, _, end = head.partition("\u2026")  # names that are still too long
        assert len(head) <= 20
        assert CALLED[name] == head or (
            CALLED[name].startswith(begin) and CALLED[name].endswith(end)
        )
    page.close()  # otherwise it requests the deleted experiment
    away(stage, experiment_id)


def test_address_changed_during_load_is_shown(stage: Stage, spectator: Watched) -> None:
    page = spectator.show("#/")
    address = f"#/experiments/{stage.sweep}/hyperparameters"
    change = (
        f"window.addEventListener('DOMContentLoaded', () => {{ location.hash = '{address}'; }})"
    )
    page.add_init_script(change)
    page.reload()
    expect(plot(page, "parallel coordinates")).to_be_visible()
    expect(page.get_by_label("color by")).to_have_value("metric")
    page.close()  # with the script, which cannot be removed


def test_add_and_remove_filter(stage: Stage, spectator: Watched) -> None:
    page = spectator.show(f"#/experiments/{stage.sweep}/trials")
    page.get_by_role("button", name="filter").click()
    page.get_by_label("comparison").select_option("<=")
    page.get_by_label("value").fill("0.1")
    page.get_by_role("button", name="add").click()
    expect(page.locator(LR)).to_have_count(10)
    page.reload()
    expect(page.locator(LR)).to_have_count(10)
    expect(page.get_by_role("status")).to_have_text(f"10 of {TRIALS} trials")
    page.get_by_role("link", name="hyperparameters", exact=True).click()
    expect(plot(page, "parallel coordinates")).to_have_accessible_name(re.compile(", 10 kept"))
    page.get_by_role("button", name=re.compile("^remove optimizer.lr")).click()
    kept_text = re.compile(f", {TRIALS} kept")
    expect(plot(page, "parallel coordinates")).to_have_accessible_name(kept_text)


def test_invalid_filter_shows_error(stage: Stage, spectator: Watched) -> None:
    page = spectator.show(f"#/experiments/{stage.sweep}/trials?where=nonsense")
    expect(page.get_by_role("alert")).to_contain_text("are invalid")
    expect(page.locator(LR)).to_have_count(TRIALS)


def test_brush_selects_same_trials_as_server(stage: Stage, spectator: Watched) -> None:
    page = spectator.show(f"#/experiments/{stage.sweep}/hyperparameters")
    grip = page.locator("[data-axis='hparams.optimizer.lr']")
    grip.scroll_into_view_if_needed()
    box = grip.bounding_box()
    assert box is not None
    across = box["x"] + box["width"] / 2
    page.mouse.move(across, box["y"] + 0.7 * box["height"])
    page.mouse.down()
    page.mouse.move(across, box["y"] + 0.3 * box["height"], steps=4)
    page.mouse.up()
    expect(page.get_by_role("status")).to_have_text(re.compile(rf"^\d+ of {TRIALS} trials$"))
    status = page.get_by_role("status").inner_text()
    count = int(status.split()[0])
    assert 10 < count < 40
    page.get_by_role("link", name="show in table").click()
    expect(page.locator(LR)).to_have_count(count)
    expect(page.get_by_role("status")).to_have_text(status)


def test_brush_by_keyboard(stage: Stage, spectator: Watched) -> None:
    page = spectator.show(f"#/experiments/{stage.sweep}/hyperparameters")
    handle = page.get_by_role("slider", name="optimizer.lr, from")
    handle.focus()
    for _ in range(5):
        handle.press("Shift+ArrowUp")
    expect(page.get_by_role("status")).to_have_text(re.compile(rf"^2\d of {TRIALS} trials$"))
    handle.press("Escape")
    expect(page.get_by_role("status")).to_have_text(f"{TRIALS} trials")


def test_axis_toggles_linear_and_log(stage: Stage, spectator: Watched) -> None:
    page = spectator.show(f"#/experiments/{stage.sweep}/hyperparameters")
    button = page.get_by_role("button", name=re.compile("^optimizer.lr: .* axis"))
    before = button.text_content() or ""
    button.focus()
    button.press("Enter")
    expect(button).not_to_have_text(before)
    page.reload()
    expect(button).not_to_have_text(before)


def test_trial_colour_is_stable_in_views(stage: Stage, spectator: Watched) -> None:
    trial = stage.trials(stage.sweep)[7]
    page = spectator.show(f"#/experiments/{stage.sweep}/curves/{trial}")
    color = page.get_by_label("trials").locator("line").get_attribute("stroke") or ""
    page.goto(f"{stage.url}/#/experiments/{stage.sweep}/trials")
    row = page.get_by_role("row").filter(has=page.get_by_label(f"trial {trial}", exact=True))
    red, green, blue = (int(color[at : at + 2], 16) for at in (1, 3, 5))
    expect(row.locator(".swatch")).to_have_css("background-color", f"rgb({red}, {green}, {blue})")
    only = json.dumps([["id", "=", trial]])
    page.goto(f"{stage.url}/#/experiments/{stage.sweep}/hyperparameters?where={only}")
    page.get_by_label("color by").select_option("trial")
    for name in ("parallel coordinates", "scatter"):
        expect(figure(page, name).locator("canvas").first).to_be_visible()
        until(f"{name} has it", lambda: _drawn(figure(page, name), color), lambda n: n > 5)  # noqa: B023 - asked at once


def _drawn(drawing: Locator, color: str) -> int:
    return pixels(drawing, near(color))


def test_arrow_keys_move_between_points(stage: Stage, spectator: Watched) -> None:
    page = spectator.show(f"#/experiments/{stage.sweep}/hyperparameters")
    dots = plot(page, "scatter")
    dots.focus()
    dots.press("ArrowRight")
    readout = figure(page, "scatter").locator(".readout")
    expect(readout).to_contain_text("lr 0.01")
    dots.press("ArrowRight")
    expect(readout).to_contain_text("lr 0.02")
    trial = readout.inner_text().split()[1]
    dots.press("Enter")
    expect(page).to_have_url(re.compile(f"/trials/{trial}$"))


def test_any_two_columns_are_drawn_against_each_other(stage: Stage, spectator: Watched) -> None:
    page = spectator.show(f"#/experiments/{stage.sweep}/hyperparameters")
    page.get_by_label("x axis").select_option("slot_seconds")
    page.get_by_label("y axis").select_option(label="optimizer.lr")
    expect(plot(page, "scatter")).to_have_accessible_name(re.compile("optimizer.lr over slot time"))
    page.reload()
    expect(plot(page, "scatter")).to_have_accessible_name(re.compile("optimizer.lr over slot time"))


def test_importance_is_shown_with_its_method_and_its_limits(
    stage: Stage, spectator: Watched
) -> None:
    page = spectator.show(f"#/experiments/{stage.sweep}/hyperparameters")
    shown = figure(page, "importance")
    expect(shown.get_by_role("row")).to_have_count(1)
    expect(shown).to_contain_text("optimizer.lr")
    shown.get_by_text("method and limits").click()
    expect(shown).to_contain_text("Permutation importance")
    expect(shown).to_contain_text("It shows correlation, not cause")


def test_best_so_far_and_cost_are_shown(stage: Stage, spectator: Watched) -> None:
    page = spectator.show(f"#/experiments/{stage.sweep}/search")
    progress = stage.played.get(f"/experiments/{stage.sweep}/search-progress")
    count = len(progress["improvements"])
    assert count >= 1
    best = figure(page, "best so far")
    expect(best).to_contain_text(f"in {TRIALS} validations")
    expect(plot(page, "best so far")).to_have_accessible_name(re.compile(f": {count} dots"))
    cost = figure(page, "cost")
    expect(cost.get_by_role("row")).to_have_count(13)  # twelve, and the others
    expect(cost).to_contain_text(f"{TRIALS - 12} others")
    page.get_by_role("link", name="all trials by cost").click()
    expect(page.get_by_role("columnheader", name="slot time")).to_have_attribute(
        "aria-sort", "descending"
    )


def test_rungs_show_trials(stage: Stage, spectator: Watched) -> None:
    played = stage.played
    searcher = {
        "name": "async_halving", "metric": "loss", "max_time": 90, "time_metric": "batches",
        "max_trials": 6, "num_rungs": 2, "divisor": 3, "max_concurrent_trials": 6,
    }  # fmt: skip
    space = {
        "deepspeed_config": "ds_config.json",
        "optimizer": {"lr": {"type": "log", "base": 10, "minval": -5, "maxval": -1}},
    }
    experiment_id = int(played.submit(name="rungs", searcher=searcher, hyperparameters=space)["id"])
    page = spectator.show(f"#/experiments/{experiment_id}/search")
    expect(page.get_by_text("No trial has reached a rung yet.")).to_be_visible()
    runs = until(
        "its six trials run",
        lambda: [item for item in played.work() if item.spec.experiment_id == experiment_id],
        lambda items: len(items) == 6,
    )
    for position, item in enumerate(runs):
        played.post(f"/runs/{item.run_id}/started", {})
        played.report(item.run_id, validation(30, 1.0 + position))
    rungs = figure(page, "rungs of bracket 1")
    levels = played.get(f"/experiments/{experiment_id}/searcher")["searcher"]["brackets"][0][
        "rungs"
    ]
    first = rungs.locator("tbody tr").first
    for state in ("promoted", "stopped"):
        count = sum(entry["state"] == state for entry in levels[0]["entries"])
        assert count > 0
        expect(first.locator(f"[data-name={state}] summary")).to_have_text(str(count))
    expect(first.locator("[data-name=best]")).to_have_text("1")
    judged = sum(len(rung["entries"]) for rung in levels)
    dots = rungs.get_by_role("application")
    expect(dots).to_have_accessible_name(re.compile(f": {judged} dots"))
    dots.focus()
    dots.press("ArrowRight")
    expect(rungs.locator(".readout")).to_contain_text("rank 1 of 6")
    page.close()  # otherwise it requests the deleted experiment
    away(stage, experiment_id)


@pytest.mark.parametrize("view", ["trials", "search", "hyperparameters"])
def test_empty_search_shows_message(stage: Stage, spectator: Watched, view: str) -> None:
    page = spectator.show(f"#/experiments/{stage.waiting}/{view}")
    messages = {
        "trials": "slots",
        "search": "No validations yet.",
        "hyperparameters": "There is only one trial.",
    }
    expect(page.locator("section, p.muted").filter(has_text=messages[view]).first).to_be_visible()


def test_bulk_action_on_trials_asks_once(stage: Stage, spectator: Watched) -> None:
    searcher = {"name": "grid", "metric": "loss", "max_length": 20, "max_concurrent_trials": 9}
    space = {
        "deepspeed_config": "ds_config.json",
        "lr": {"type": "categorical", "vals": [0.1, 0.2, 0.3]},
    }
    experiment = stage.played.submit(
        activate=False, searcher=searcher, hyperparameters=space, name="bulk"
    )
    page = spectator.show(f"#/experiments/{experiment['id']}/trials")
    boxes = page.get_by_role("checkbox")
    expect(boxes).to_have_count(3)
    boxes.nth(0).evaluate(
        "box => { box.click(); box.closest('tbody').rows[2].querySelector('input').click() }"
    )
    expect(page.get_by_role("checkbox", checked=True)).to_have_count(2)  # clicked at once
    page.get_by_role("button", name="kill", exact=True).last.click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("kill 2 trials?")
    dialog.get_by_role("button", name="Cancel").click()
    states = [trial["state"] for trial in stage.played.trials(experiment["id"])]
    assert "CANCELED" not in states
    page.get_by_role("button", name="kill", exact=True).last.click()
    dialog.get_by_role("button", name="kill").click()
    expect(dialog).to_have_count(0)
    expect(page.locator("tbody .badge.canceled")).to_have_count(2)
    page.get_by_role("button", name="archive", exact=True).click()  # of the two selected
    dialog.get_by_role("button", name="archive").click()
    expect(dialog).to_have_count(0)
    expect(page.locator("tbody tr")).to_have_count(1)
    page.get_by_label("Show archived (2)").check()
    expect(page.locator("tbody tr")).to_have_count(3)
    expect(page.get_by_role("button", name="delete", exact=True)).to_be_disabled()
    stage.played.act("kill", experiment["id"])
    page.get_by_role("button", name="delete", exact=True).click()
    expect(dialog).to_contain_text("delete 2 trials?")
    dialog.get_by_role("button", name="delete").click()
    expect(page.locator("tbody tr")).to_have_count(1)
    assert len(stage.played.trials(experiment["id"])) == 1
    page.close()  # otherwise it requests the deleted experiment
    away(stage, experiment["id"])


def test_bulk_archive_and_delete_ask_first(stage: Stage, spectator: Watched) -> None:
    experiment_ids = []
    for number in range(3):
        experiment_id = stage.played.submit(activate=False, name=f"throwaway {number}")["id"]
        stage.played.act("kill", experiment_id)
        experiment_ids.append(experiment_id)
    page = spectator.show("#/?find=throwaway")
    for experiment_id in experiment_ids[:2]:
        page.get_by_label(f"experiment {experiment_id}", exact=True).check()
    page.get_by_role("button", name="archive", exact=True).click()
    page.get_by_role("dialog").get_by_role("button", name="archive").click()
    expect(page.locator("td.name")).to_have_count(1)
    page.get_by_label("Show archived").check()
    page.get_by_label("select all").check()
    page.get_by_role("button", name="delete").click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("delete 3 experiments?")
    expect(dialog).to_contain_text("cannot be undone")
    dialog.get_by_role("button", name="delete").click()
    expect(page.get_by_text("No matches.")).to_be_visible()
    remaining = {row["id"] for row in stage.played.get("/experiments", limit=1000)["experiments"]}
    assert not remaining & set(experiment_ids)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_search_views_fit_narrow_window(stage: Stage, spectator: Watched, scheme: str) -> None:
    page = spectator.page
    page.emulate_media(color_scheme="dark" if scheme == "dark" else "light")
    page.set_viewport_size({"width": NARROW["width"], "height": NARROW["height"]})
    for view in ("search", "hyperparameters", "trials"):
        spectator.show(f"#/experiments/{stage.sweep}/{view}")
        expect(page.locator("section")).to_be_visible()
        page.wait_for_function("document.fonts.ready.then(() => true)")
        assert page.evaluate("document.documentElement.scrollWidth") <= NARROW["width"], view


@pytest.mark.parametrize("of", ["experiment", "trial"])
def test_narrow_window_shows_disconnected(stage: Stage, spectator: Watched, of: str) -> None:
    page = spectator.page
    page.set_viewport_size({"width": NARROW["width"], "height": NARROW["height"]})
    page.route("**/events*", lambda route: None)  # the response is pending
    trial = stage.trials(stage.sweep)[0]
    spectator.show(f"#/trials/{trial}" if of == "trial" else f"#/experiments/{stage.sweep}/search")
    expect(page.get_by_text("not connected")).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= NARROW["width"]
    page.unroute_all(behavior="ignoreErrors")


def test_cost_table_fits_narrow_window(stage: Stage, spectator: Watched) -> None:
    played = stage.played
    metric = "validation_accuracy_of_the_mean"
    searcher = {"name": "single", "metric": metric, "max_length": 20}
    experiment_id = int(played.submit(name="long metric", searcher=searcher)["id"])
    (item,) = until(
        "its trial runs",
        lambda: [item for item in played.work() if item.spec.experiment_id == experiment_id],
        lambda items: len(items) == 1,
    )
    played.post(f"/runs/{item.run_id}/started", {})
    played.send(item.run_id, 1, [metrics("validation", 20, **{metric: -1.2345e-10})])
    played.exit(item.run_id, 0)
    page = spectator.page
    page.set_viewport_size({"width": NARROW["width"], "height": NARROW["height"]})
    spectator.show(f"#/experiments/{experiment_id}/search")
    expect(figure(page, "cost").locator("td.figure")).to_contain_text(metric)
    assert page.evaluate("document.documentElement.scrollWidth") <= NARROW["width"]
    page.close()  # otherwise it requests the deleted experiment
    away(stage, experiment_id)


def test_search_controls_have_accessible_names(stage: Stage, spectator: Watched) -> None:
    page = spectator.show(f"#/experiments/{stage.sweep}/hyperparameters")
    expect(figure(page, "importance").get_by_role("row")).to_have_count(1)
    nameless = page.evaluate("""() => [...document.querySelectorAll(
        'button, select, input, [role=slider], [role=button], [role=application]')]
        .filter((e) => !(e.getAttribute('aria-label') || e.textContent.trim() || e.labels?.length))
        .map((e) => e.outerHTML)""")
    assert nameless == []
