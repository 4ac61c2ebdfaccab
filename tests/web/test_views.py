"""Lists, logs, configuration and addresses: texts, filters, stored choices, downloads."""

import json
import re
from pathlib import Path

import pytest
import yaml
from playwright.sync_api import Locator, Page, expect

from tests.server.helpers import ENGINE
from tests.waiting import until
from tests.web.conftest import Watched
from tests.web.stage import ERROR, LINES, TRIALS, Stage

pytestmark = [pytest.mark.browser, pytest.mark.processes]

COLOR = "element => getComputedStyle(element).color"
NARROW = {"width": 400, "height": 800}


def names(page: Page) -> list[str]:
    """Return the names in the list, from top to bottom."""
    return page.locator("td.name .line > a").all_inner_texts()


def test_completed_without_result_has_reason(stage: Stage, spectator: Watched) -> None:
    reason = stage.played.experiment(stage.empty)["result_problem"]
    page = spectator.show("#/")
    row = page.get_by_role("row").filter(has=page.get_by_role("link", name="empty"))
    expect(row.locator(".badge")).to_have_text("completed, no result")
    expect(row).to_contain_text(reason)
    good = page.get_by_role("row").filter(has=page.get_by_role("link", name="long"))
    expect(good.locator(".badge")).to_have_text("completed")
    assert row.locator(".badge").evaluate(COLOR) != good.locator(".badge").evaluate(COLOR)
    row.get_by_role("link").click()
    expect(page.get_by_role("alert")).to_contain_text(reason)
    page.get_by_role("link", name="trials", exact=True).click()
    expect(page.locator("td.state")).to_contain_text("completed, no result")


def test_queued_experiment_shows_reason(stage: Stage, spectator: Watched) -> None:
    def shared_text(element: Locator) -> str:
        """Return the reason when the page and the server show the same."""
        _, reason, _ = until(
            "page and server show the same reason",
            lambda: (
                stage.played.work(),
                stage.played.experiment(stage.waiting)["waiting_reason"],
                element.inner_text(),
            ),
            lambda seen: f"at most {TRIALS}" in seen[1] and seen[1] in seen[2],
        )
        return str(reason)

    page = spectator.show("#/")
    row = page.get_by_role("row").filter(has=page.get_by_role("link", name="too wide"))
    assert f"{2 * TRIALS} slots" in shared_text(row)
    expect(row.locator(".badge")).to_have_text("active, waiting")
    row.get_by_role("link").click()
    shared_text(page.get_by_role("alert"))
    page.get_by_role("link", name="trials", exact=True).click()
    shared_text(page.locator("td.state"))


def test_long_error_is_one_line_in_list(stage: Stage, spectator: Watched) -> None:
    page = spectator.show("#/")
    row = page.get_by_role("row").filter(has=page.get_by_role("link", name="failed"))
    box = row.bounding_box()
    assert box is not None
    assert box["height"] < 45
    expect(row.get_by_text("ValueError")).to_have_attribute("title", ERROR.strip())


def test_early_failure_opens_log_of_rank(stage: Stage, spectator: Watched) -> None:
    page = spectator.show(f"#/experiments/{stage.failed}")
    lines = page.get_by_label("log lines")
    expect(lines).to_contain_text("line 1499 of rank 0")
    page.get_by_role("alert").get_by_role("link", name="Logs of rank 1").click()
    expect(lines).not_to_contain_text("of rank 0")
    expect(lines).to_contain_text("red words of rank 1")  # without ANSI colours
    expect(page.get_by_label("rank", exact=True)).to_have_value("1")
    page.reload()
    expect(page.get_by_label("rank", exact=True)).to_have_value("1")
    page.get_by_label("rank", exact=True).select_option("0")
    expect(lines).to_contain_text("line 1499 of rank 0")
    expect(lines).not_to_contain_text("of rank 1")


def test_full_log_can_be_downloaded(stage: Stage, spectator: Watched, tmp_path: Path) -> None:
    page = spectator.show(f"#/experiments/{stage.failed}/logs")
    expect(page.get_by_text("Last 1,000 lines")).to_be_visible()
    with page.expect_download() as started:
        page.get_by_role("button", name="download").click()
    started.value.save_as(tmp_path / "log")
    text = (tmp_path / "log").read_text()
    assert text.count("of rank 0\n") == LINES
    assert text.index("line 0 of rank 0") < text.index(f"line {LINES - 1} of rank 0")
    page.get_by_role("button", name="Load older lines").click()
    expect(page.get_by_label("log lines")).to_contain_text("line 0 of rank 0")


def test_config_yaml_round_trips(stage: Stage, spectator: Watched) -> None:
    page = spectator.show(f"#/experiments/{stage.long}/configuration")
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    config = stage.played.experiment(stage.long)["config"]
    shown = page.get_by_label("configuration", exact=True)
    until("all of it", lambda: yaml.safe_load(shown.inner_text()), config.__eq__)
    page.get_by_role("button", name="copy").click()
    expect(page.get_by_role("button", name="copied")).to_be_visible()
    assert yaml.safe_load(page.evaluate("navigator.clipboard.readText()")) == config
    page.get_by_role("button", name="JSON").click()
    expect(shown).to_contain_text('"name": "long"')


def test_list_filter_and_order_are_stored(stage: Stage, spectator: Watched) -> None:
    page = spectator.show("#/")
    expect(page.locator("td.name")).to_have_count(5)
    page.get_by_role("button", name="name", exact=True).click()
    by_name = ["empty", "failed", "long", "sweep", "too wide"]
    until("the order of their names", lambda: names(page), by_name.__eq__)
    page.get_by_label("state").select_option(label="No result")
    for _ in range(2):
        until("those without a result", lambda: names(page), lambda got: got == ["empty", "failed"])
        page.reload()
    page.get_by_label("state").select_option(label="Waiting")
    until("what waits", lambda: names(page), lambda got: got == ["too wide"])


def test_trials_filter_by_state_and_sort_by_hparam(stage: Stage, spectator: Watched) -> None:
    page = spectator.show(f"#/experiments/{stage.sweep}/trials")
    rates = page.locator("[data-name='optimizer.lr']")
    expect(rates).to_have_count(TRIALS)
    head = page.get_by_role("button", name="optimizer.lr")
    head.click()
    head.click()
    expect(rates.first).to_have_text(str(0.01 * TRIALS))
    page.get_by_label("state").select_option(label="No result")
    expect(rates).to_have_count(1)
    page.reload()
    expect(rates).to_have_count(1)
    expect(page.locator("td.state")).to_contain_text("impossible")


def test_model_directory_and_engine_config_download(stage: Stage, spectator: Watched) -> None:
    page = spectator.show(f"#/experiments/{stage.long}/code")
    expect(page.get_by_label("content of model_def.py")).to_contain_text("class Trial(zerotrial")
    page.get_by_role("button", name="ds_config.json").click()
    content = page.get_by_label("content of ds_config.json")
    expect(content).to_have_text(json.dumps(ENGINE))
    with page.expect_download() as saved:
        page.get_by_role("link", name="download", exact=True).click()
    assert saved.value.suggested_filename == "ds_config.json"
    assert json.loads(saved.value.path().read_text()) == ENGINE
    page.reload()
    expect(content).to_be_visible()

    (trial,) = stage.trials(stage.long)
    page.get_by_role("link", name="configuration", exact=True).click()
    page.get_by_role("link", name=f"engine of trial {trial}").click()
    row = page.get_by_role("row").filter(has_text="gradient_accumulation_steps")
    expect(row).to_contain_text("derived")
    default = page.get_by_role("row").filter(has_text="default")
    expect(default.first).to_be_visible()
    page.get_by_label("values").select_option("set")
    expect(default).to_have_count(0)
    with page.expect_download() as saved:
        page.get_by_role("button", name="download").click()
    downloaded = json.loads(saved.value.path().read_text())
    assert {key: downloaded[key] for key in ENGINE if key != "optimizer"} == {
        key: value for key, value in ENGINE.items() if key != "optimizer"
    }
    spectator.show(f"#/trials/{stage.trials(stage.waiting)[0]}/engine")
    expect(page.get_by_role("alert").last).to_contain_text("deepspeed_config: is not given")


def test_table_columns_are_stored(stage: Stage, spectator: Watched) -> None:
    last = stage.played.get("/experiments/columns", column="last.training.loss")["columns"]
    expected = (
        f"{last['last.training.loss'][last['id'].index(stage.sweep)]:.4g}"  # of its best trial
    )
    page = spectator.show("#/")
    page.get_by_text("columns", exact=True).click()
    choice = page.get_by_role("group", name="columns")
    choice.get_by_label("column rate", exact=True).check()
    choice.get_by_label("column progress", exact=True).uncheck()
    choice.get_by_label("column last training: loss", exact=True).check()
    expect(
        choice.get_by_role("group", name="Hyperparameters").get_by_label("column rate")
    ).to_be_checked()
    page.keyboard.press("Escape")
    expect(choice).to_have_count(0)
    expect(page.get_by_role("button", name="columns", exact=True)).to_be_focused()
    page.get_by_role("button", name="rate", exact=True).click()
    for _ in range(2):
        expect(page.locator("td[data-name=rate]").first).to_have_text("1.00e-7")
        expect(page.locator("td[data-name=progress]")).to_have_count(0)
        row = page.locator("tr", has=page.locator(f"a[href='#/experiments/{stage.sweep}']"))
        expect(row.locator("[data-name='last training: loss']")).to_have_text(expected)
        page.reload()

    spectator.show(f"#/experiments/{stage.sweep}/trials")
    page.get_by_text("columns", exact=True).click()
    choice.get_by_label("search columns").fill("training: loss")
    choice.get_by_label("column max training: loss", exact=True).check()
    choice.get_by_label("search columns").fill("restarts")
    choice.get_by_label("column restarts").uncheck()
    page.get_by_role("heading").first.click()
    expect(choice).to_have_count(0)
    page.get_by_role("button", name="max training: loss").click()
    best = {t["id"]: t["best_validation"] for t in stage.played.trials(stage.sweep)}
    worst = max(best, key=lambda id_: best[id_])
    first = page.locator("tbody tr").first
    for _ in range(2):
        expect(first.locator("[data-name=trial]")).to_contain_text(str(worst))
        # Every curve begins 1 above its end.
        expected = f"{best[worst] + 1:.4g}"
        expect(first.locator("[data-name='max training: loss']")).to_have_text(expected)
        expect(page.locator("td[data-name=restarts]")).to_have_count(0)
        page.reload()
    page.get_by_text("columns", exact=True).click()
    choice.get_by_role("button", name="Reset").click()
    expect(page.locator("td[data-name=restarts]").first).to_be_visible()
    expect(page.locator("td[data-name='max training: loss']")).to_have_count(0)


@pytest.mark.parametrize(
    "address",
    ["#/nonsense", "#/experiments/1/nonsense", "#/experiments/x", "#/trials/1/x", "#/compare/1,x"],
)
def test_unknown_address_shows_message(stage: Stage, spectator: Watched, address: str) -> None:
    page = spectator.show(address)
    hint = page.get_by_role("alert")
    expect(hint).to_contain_text(address)
    hint.get_by_role("link").click()
    expect(page.get_by_role("heading", name="Experiments")).to_be_visible()


@pytest.mark.parametrize(
    "view",
    [
        "list",
        "cluster",
        "models",
        "compare",
        "trial",
        "runs",
        "curves",
        "trials",
        "logs",
        "configuration",
    ],
)
def test_page_fits_narrow_window(stage: Stage, spectator: Watched, view: str) -> None:
    page = spectator.page
    page.set_viewport_size({"width": 400, "height": 800})
    (failed,) = stage.trials(stage.failed)
    addresses = {
        "list": "#/",
        "cluster": "#/cluster",
        "models": "#/models",
        "compare": f"#/compare/{stage.sweep},{stage.failed}",
        "trial": f"#/trials/{failed}/curves",
        "runs": f"#/trials/{failed}/runs",
    }
    spectator.show(addresses.get(view, f"#/experiments/{stage.sweep}/{view}"))
    seen = {
        "list": "td.name",
        "cluster": ".queue",
        "models": "h1",
        "compare": ".chart canvas",
        "trial": ".facts",
        "runs": "td",
        "curves": ".chart canvas",
        "trials": "td.state",
        "logs": ".logs",
        "configuration": ".config",
    }
    expect(page.locator(seen[view]).first).to_be_visible()
    beyond = """() => [document.documentElement, ...document.querySelectorAll(".table")]
        .map((element) => element.scrollWidth - element.clientWidth)"""
    until("nothing is wider than the window", lambda: page.evaluate(beyond),
          lambda widths: max(widths) <= 0)  # fmt: skip
    for cell in page.locator("[data-name='best validation']").all()[:5]:
        box = cell.bounding_box()
        assert box is not None
        assert box["x"] + box["width"] <= 400


def test_theme_follows_system_or_choice(stage: Stage, spectator: Watched) -> None:
    page = spectator.show(f"#/experiments/{stage.sweep}/hyperparameters")
    back = "() => getComputedStyle(document.documentElement).backgroundColor"
    expect(page.locator("canvas").first).to_be_visible()
    theme = page.get_by_label("theme")
    expect(theme).to_have_value("")

    def brightness() -> int:
        return sum(map(int, re.findall(r"\d+", page.evaluate(back))[:3]))

    def is_dark(description: str) -> None:
        until(description, brightness, lambda sum_of_parts: sum_of_parts < 150)

    def is_light(description: str) -> None:
        until(description, brightness, lambda sum_of_parts: sum_of_parts > 700)

    is_light("as the system is")
    page.emulate_media(color_scheme="dark")
    is_dark("as the system is now")
    theme.select_option("light")
    is_light("as was chosen")
    page.reload()
    expect(theme).to_have_value("light")
    is_light("it is remembered")
    page.emulate_media(color_scheme="light")
    theme.select_option("dark")
    is_dark("as was chosen")
    theme.select_option("")
    is_light("as the system is again")


def test_edit_name_description_labels_and_notes(stage: Stage, spectator: Watched) -> None:
    page = spectator.show(f"#/experiments/{stage.long}")
    before = stage.played.experiment(stage.long)
    page.get_by_role("button", name="edit").click()
    dialog = page.get_by_role("dialog")
    name = dialog.get_by_label("Name", exact=True)
    expect(name).to_have_value("long")
    name.fill("x" * 5000)
    dialog.get_by_role("button", name="save").click()
    expect(dialog.get_by_role("alert")).to_contain_text("name")
    name.fill("longer <b>than</b> before")
    dialog.get_by_label("labels").fill("vision, baseline,, vision")
    dialog.get_by_label("notes").fill("first line\nsecond line")
    dialog.get_by_role("button", name="save").click()
    expect(dialog).to_have_count(0)
    expect(page.get_by_role("heading", name="longer <b>than</b> before")).to_be_visible()
    expect(page.get_by_role("heading").locator(".label")).to_have_text(["vision", "baseline"])
    expect(page.get_by_label("notes")).to_have_text("first line\nsecond line")
    now = stage.played.experiment(stage.long)
    assert (now["labels"], now["notes"]) == (["vision", "baseline"], "first line\nsecond line")
    assert (now["description"], now["config"]) == (before["description"], before["config"])
    undo = {key: before[key] for key in ("name", "labels", "notes")}
    stage.played.request("PATCH", f"/experiments/{stage.long}", json=undo)
    expect(page.get_by_role("heading", name="long", exact=False)).to_be_visible()
    spectator.faults.clear()  # the browser logs the 422
