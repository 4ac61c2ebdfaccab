"""Trial page: state and reason, hyperparameters, runs."""

import re

import pytest
from playwright.sync_api import expect

from tests.waiting import until
from tests.web.conftest import Watched
from tests.web.drawings import BLUE, chart, pixels
from tests.web.stage import ERROR, LINES, Stage

pytestmark = [pytest.mark.browser, pytest.mark.processes]


def test_trial_page_shows_curves_hparams_and_runs(stage: Stage, spectator: Watched) -> None:
    (best,) = stage.best(1)
    page = spectator.show(f"#/experiments/{stage.sweep}/trials")
    page.get_by_role("row").filter(has=page.get_by_label(f"trial {best}", exact=True)).get_by_role(
        "link", name=str(best), exact=True
    ).click()
    heading = page.get_by_role("heading", name=f"trial {best}")
    expect(heading).to_contain_text("of sweep, best trial")
    loss = chart(page, "training: loss")
    expect(loss).to_have_accessible_name(re.compile(": 20 points to batch 20$"))
    until("the curve is drawn", lambda: pixels(loss, BLUE), lambda drawn: drawn > 100)
    facts = page.locator(".facts")
    trial = stage.played.trial(best)
    expect(facts).to_contain_text(f"seed{trial['seed']}")
    expect(facts).to_contain_text("best loss1 at batch 20")

    page.get_by_role("link", name="hyperparameters", exact=True).click()
    row = page.get_by_role("row").filter(has_text="optimizer.lr")
    expect(row).to_contain_text(str(trial["hparams"]["optimizer"]["lr"]))
    expect(row).to_contain_text("categorical")

    page.get_by_role("link", name="runs", exact=True).click()
    run = page.locator("tbody tr")
    expect(run).to_have_count(1)
    expect(run).to_contain_text("exited")
    expect(run.locator("[data-name=agents]")).to_have_text("agent")
    expect(run).to_contain_text("finished")
    page.reload()
    expect(run).to_have_count(1)


def test_failed_trial_opens_its_log(stage: Stage, spectator: Watched) -> None:
    (failed,) = stage.trials(stage.failed)
    page = spectator.show(f"#/trials/{failed}")
    expect(page.get_by_role("alert")).to_contain_text(ERROR.strip())
    expect(page.get_by_label("log lines")).to_contain_text(f"line {LINES - 1} of rank 0")
    page.get_by_role("link", name="runs", exact=True).click()
    run = page.locator("tbody tr")
    run.get_by_text("ValueError").first.click()
    expect(run.locator("pre")).to_have_text(ERROR.strip())
    expect(run.locator("[data-name='exit code']")).to_have_text("1")


def test_queued_trial_shows_reason_and_kill_asks(stage: Stage, spectator: Watched) -> None:
    experiment = stage.played.submit(
        name="waits", entrypoint="python3 model_def.py", hyperparameters={}, activate=False
    )["id"]
    (trial,) = stage.trials(experiment)
    page = spectator.show(f"#/trials/{trial}")
    expect(page.get_by_role("alert")).to_contain_text("Waiting")
    expect(page.get_by_role("alert")).to_contain_text("paused")
    page.get_by_role("button", name="kill").click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("without a checkpoint")
    page.keyboard.press("Escape")
    expect(dialog).to_have_count(0)
    assert stage.played.trial(trial)["state"] == "PAUSED"
    page.get_by_role("button", name="kill").click()
    dialog.get_by_role("button", name="kill").click()
    expect(page.get_by_role("heading").locator(".badge")).to_have_text("canceled")
    expect(dialog).to_have_count(0)
    page.close()  # otherwise it requests the deleted experiment
    stage.played.request("DELETE", f"/experiments/{experiment}")


def test_missing_trial_shows_message(stage: Stage, spectator: Watched) -> None:
    page = spectator.page
    spectator.show("#/trials/99999")
    expect(page.get_by_role("alert")).to_contain_text("there is no trial 99999")
    expect(page.get_by_role("link", name="All experiments")).to_be_visible()
    spectator.faults.clear()  # the browser logs the 404
