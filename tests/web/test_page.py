"""Main pages in a real browser: content, live updates, no requests to other servers."""

import gzip
import re
import tarfile
from pathlib import Path

import pytest
from playwright.sync_api import expect

from tests.waiting import until
from tests.web.conftest import Site, Watched
from tests.web.drawings import BAND, BLUE, chart, pixels
from zerolab import __version__
from zeroserver.app import DOCS, STATIC

pytestmark = [pytest.mark.browser, pytest.mark.processes]


def test_list_shows_states_and_errors(site: Site, owner: Watched) -> None:
    page = owner.show("#/")
    digits = page.get_by_role("row").filter(has=page.get_by_role("link", name="digits-smoke"))
    expect(digits).to_contain_text("completed")
    expect(digits).to_contain_text("100 %")
    expect(digits).to_contain_text("validation_loss")
    broken = page.get_by_role("row").filter(has=page.get_by_role("link", name="broken"))
    expect(broken.locator(".badge")).to_have_text("error")
    expect(broken).to_contain_text("the model is broken")
    page.get_by_label("search").fill("DIGITS compl")
    expect(broken).to_have_count(0)
    expect(digits).to_have_count(1)
    digits.get_by_role("link").click()
    expect(page.get_by_role("heading", name="digits-smoke")).to_be_visible()


def test_experiment_page_has_all_sections(site: Site, owner: Watched) -> None:
    page = owner.show(f"#/experiments/{site.digits}")
    loss = chart(page, "training: loss")
    expect(loss).to_have_accessible_name(re.compile(r"points to batch 30$"))
    expect(chart(page, "validation: accuracy").locator("output")).to_have_text(re.compile(r"0\.\d"))
    until("the curve is drawn", lambda: pixels(loss, BLUE), lambda drawn: drawn > 100)

    page.get_by_role("link", name="trials", exact=True).click()
    row = page.get_by_role("row").nth(1)
    expect(row).to_contain_text("completed")
    hparams = page.get_by_text("Hyperparameters: ")
    expect(hparams).to_contain_text("hidden 32")
    expect(hparams).to_contain_text("ds_config.json")

    page.get_by_role("link", name="checkpoints", exact=True).click()
    uuid = site.installation.client.experiment_checkpoints(site.digits)[-1]["uuid"]
    saved = page.get_by_role("row").filter(has_text=uuid)
    expect(saved).to_contain_text("KiB")
    expect(saved).to_contain_text("latest")
    saved.locator("summary").click()
    file = saved.get_by_role("link", name="manifest.json").first
    downloaded = page.request.get(str(file.evaluate("link => link.href")))
    assert isinstance(downloaded.json(), dict)
    with page.expect_download() as archive:
        saved.get_by_role("link", name="all files (tar)").click()
    assert archive.value.suggested_filename.endswith(".tar")
    with tarfile.open(archive.value.path()) as opened:
        assert any(name.endswith("/checkpoint.json") for name in opened.getnames())
    dialog = page.get_by_role("dialog")
    saved.get_by_role("button", name="delete").click()
    expect(dialog).to_contain_text("This cannot be undone")
    dialog.get_by_role("button", name="Cancel").click()

    page.get_by_role("link", name="logs", exact=True).click()
    expect(page.get_by_label("log lines")).to_contain_text("validation after batch 30")

    page.get_by_role("link", name="configuration", exact=True).click()
    expect(page.get_by_label("configuration")).to_contain_text("model_def:DigitsTrial")
    page.go_back()
    expect(page.get_by_label("log lines")).to_be_visible()


def test_failed_experiment_shows_restarts_and_log(site: Site, owner: Watched) -> None:
    page = owner.show(f"#/experiments/{site.failed}/logs")
    expect(page.get_by_role("alert")).to_contain_text("the model is broken")
    facts = page.locator(".facts")
    expect(facts).to_contain_text("restarts1")
    lines = page.get_by_label("log lines")
    expect(lines).to_contain_text("Traceback (most recent call last)")
    page.get_by_label("minimum level").select_option("ERROR")
    expect(lines).not_to_contain_text("Traceback (most recent call last)")
    failed = lines.locator(".error").last
    expect(failed).to_contain_text("no restart")
    color = "element => getComputedStyle(element).color"
    assert failed.evaluate(color) != lines.evaluate(color)


def test_curve_spans_gaps_and_draws_band(site: Site, owner: Watched) -> None:
    page = owner.show(f"#/experiments/{site.long}")
    holey = chart(page, "validation: holey")
    expect(holey).to_contain_text("2 NaN or infinite, first at batch 3")
    expect(holey.locator("output")).to_have_text("1")
    until("the curve is drawn", lambda: pixels(holey, BLUE), lambda drawn: drawn > 100)
    noisy = chart(page, "training: noisy")
    expect(noisy).to_have_accessible_name(re.compile(r"points to batch 3000$"))
    until(
        "the curve of merged points alone has a band",
        lambda: (pixels(noisy, BAND), pixels(holey, BAND)),
        lambda drawn: drawn[0] > 10 * drawn[1],
    )


def test_trials_sort_and_select_curves(site: Site, owner: Watched) -> None:
    page = owner.show(f"#/experiments/{site.grid}")
    loss = chart(page, "training: loss")
    expect(loss).to_have_accessible_name(re.compile("3 curves, 15 points to batch 5$"))
    page.get_by_role("link", name="trials", exact=True).click()
    rows = page.get_by_role("row").filter(has=page.get_by_role("checkbox"))
    expect(rows).to_have_count(3)
    page.get_by_role("button", name="best validation").click()
    for position, slope in enumerate((3, 20, 100)):
        expect(rows.nth(position).locator("[data-name=slope]")).to_have_text(str(slope))
    expect(rows.nth(0)).to_contain_text("best")
    rows.nth(0).get_by_role("checkbox").check()
    rows.nth(2).get_by_role("checkbox").check()
    expect(page.locator(".chosen")).to_contain_text("2 trials")
    page.get_by_role("link", name="curves", exact=True).click()
    expect(loss).to_have_accessible_name(re.compile("2 curves, 10 points to batch 5$"))


def test_running_experiment_updates_live(site: Site, owner: Watched, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    page = owner.show("#/")
    page.evaluate("window.untouched = true")
    experiment = site.submit_script(tmp_path.name, what="wait", gate=str(gate))
    row = page.get_by_role("row").filter(has=page.get_by_role("link", name=tmp_path.name))
    expect(row.locator(".badge")).to_have_text("active")
    row.get_by_role("link").click()
    loss = chart(page, "training: loss")
    expect(loss).to_have_accessible_name(re.compile(": 10 points to batch 10$"))
    expect(page.locator(".live")).to_be_visible()
    gate.touch()
    expect(loss).to_have_accessible_name(re.compile(": 20 points to batch 20$"))
    expect(page.get_by_role("heading").locator(".badge")).to_have_text("completed")
    assert page.evaluate("window.untouched"), "the page was loaded again"
    assert site.installation.wait_for(experiment)["state"] == "COMPLETED"


def test_keyboard_navigates_views(site: Site, owner: Watched) -> None:
    page = owner.show(f"#/experiments/{site.digits}")
    page.get_by_role("link", name="curves", exact=True).focus()
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    sort = page.get_by_role("button", name="batches")
    sort.focus()
    page.keyboard.press("Enter")
    heading = page.get_by_role("columnheader", name="batches")
    expect(heading).to_have_attribute("aria-sort", "descending")


def test_header_links_to_docs(site: Site, owner: Watched) -> None:
    link = owner.show("#/").get_by_role("link", name="Docs")
    expect(link).to_have_text(f"Docs {__version__}")
    expect(link).to_have_attribute("href", "/docs/")


@pytest.mark.skipif(not (DOCS / "index.html").is_file(), reason="needs `make docs`")
def test_docs_search_works_offline(site: Site, owner: Watched) -> None:
    page = owner.show("docs/")
    page.get_by_role("textbox", name="Search").fill("preemption")
    page.locator(".md-search-result__link").first.click()
    expect(page.get_by_role("heading", level=1)).to_be_visible()
    page.locator("label[title='Use light mode']").click()
    page.locator("label[title='Use dark mode']").click()
    expect(page.locator("body")).to_have_attribute("data-md-color-scheme", "slate")


def test_login_link_works_once(site: Site, stranger: Watched) -> None:
    page = stranger.show(f"#/experiments/{site.digits}")
    hint = page.get_by_role("alert")
    expect(hint).to_contain_text("zerolab open")
    link = site.installation.client.login_link()
    page.goto(link)
    expect(page.get_by_role("link", name="digits-smoke")).to_be_visible()
    page.context.clear_cookies()
    response = page.goto(link)
    assert response is not None
    assert response.status == 403
    expect(page.locator("body")).to_contain_text("zerolab")
    stranger.show("#/")
    expect(hint).to_contain_text("zerolab open")


def test_sign_out_hides_data(site: Site, stranger: Watched) -> None:
    page = stranger.page
    page.goto(site.installation.client.login_link())
    expect(page.get_by_role("link", name="digits-smoke")).to_be_visible()
    page.get_by_role("button", name="Sign out").click()
    expect(page.get_by_role("alert")).to_contain_text("zerolab open")
    expect(page.get_by_role("link", name="digits-smoke")).to_have_count(0)


def test_continue_and_fork_ended_experiment(site: Site, owner: Watched) -> None:
    number = site.submit_script("again", what="fail")
    client = site.installation.client
    site.installation.wait_for(number)
    page = owner.show(f"#/experiments/{number}")
    head, dialog = page.locator("header .actions"), page.get_by_role("dialog")
    head.get_by_role("button", name="continue").click()
    dialog.get_by_label("changes").fill("{description}")
    dialog.get_by_role("button", name="continue").click()
    expect(dialog.get_by_role("alert")).to_contain_text("must be a JSON object")
    dialog.get_by_label("changes").fill('{"description": "changed"}')
    dialog.get_by_role("button", name="continue").click()
    expect(dialog).to_have_count(0)
    until("it continues", lambda: client.experiment(number)["config"]["description"] == "changed")
    site.installation.wait_for(number)
    before = len(client.experiments())
    head.get_by_role("button", name="fork").click()
    file = dialog.get_by_label("experiment file")
    expect(file).to_have_value(re.compile(r"^max_restarts: 1$", re.MULTILINE))
    text = file.input_value()
    assert "description: changed\n" in text
    assert "slots_per_trial: 1\n" in text
    assert "scheduling_unit" not in text, "a default was written"
    for mistaken, message in (
        (text.replace("max_restarts", "max_restart"), "did you mean 'max_restarts'?"),
        (text + "name: again\n", "name"),
    ):
        file.fill(mistaken)
        dialog.get_by_role("button", name="submit").click()
        expect(dialog.get_by_role("alert")).to_contain_text(message)
    file.fill("# without restarts\n" + text.replace("max_restarts: 1", "max_restarts: 0"))
    dialog.get_by_role("button", name="submit").click()
    until("there is a fork", lambda: len(client.experiments()) == before + 1)
    fork = max(client.experiments(), key=lambda row: row["id"])
    assert (fork["forked_from"], fork["description"]) == (number, "changed")
    assert fork["config"]["max_restarts"] == 0
    expect(page.get_by_role("heading").locator("small")).to_have_text(str(fork["id"]))
    site.installation.wait_for(fork["id"])
    owner.faults.clear()  # the browser logs the 422


def test_page_is_small() -> None:
    if not (STATIC / "index.html").is_file():
        pytest.fail("the page is not built: run `npm ci && npm run build` in server/web")
    files = [path for path in STATIC.rglob("*") if path.is_file()]
    assert sum(len(gzip.compress(path.read_bytes())) for path in files) < 150_000
