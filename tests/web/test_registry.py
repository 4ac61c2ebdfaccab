"""Model registry page: register and unregister a checkpoint."""

import pytest
from playwright.sync_api import expect

from tests.web.conftest import Watched
from tests.web.stage import Stage

pytestmark = [pytest.mark.browser, pytest.mark.processes]


def test_register_find_and_unregister_checkpoint(stage: Stage, spectator: Watched) -> None:
    (trial,) = stage.trials(stage.long)
    uuid = stage.played.trial(trial)["latest_checkpoint"]
    page = spectator.show(f"#/trials/{trial}/checkpoints")
    row, dialog = page.get_by_role("row").filter(has_text=uuid), page.get_by_role("dialog")
    row.get_by_role("button", name="register").click()
    field = dialog.get_by_label("model")
    field.fill("a/b")
    dialog.get_by_role("button", name="register").click()
    expect(dialog.get_by_role("alert")).to_contain_text("name")
    field.fill("waves.2")
    dialog.get_by_label("notes").fill("the <b>first</b>")
    dialog.get_by_role("button", name="register").click()
    expect(dialog).to_have_count(0)
    expect(page.locator(".facts")).to_contain_text("registered as")
    row.get_by_role("link", name="waves.2 1").click()
    expect(page.get_by_role("heading")).to_contain_text("waves.2")
    version = page.get_by_role("row").filter(has_text=uuid)
    expect(version).to_contain_text("the <b>first</b>")
    expect(version).to_contain_text("loss 0.2")
    expect(version.get_by_role("link", name=str(trial), exact=True)).to_have_attribute(
        "href", f"#/trials/{trial}/checkpoints"
    )
    page.go_back()
    row.get_by_role("button", name="delete").click()
    dialog.get_by_role("button", name="delete").click()
    expect(dialog.get_by_role("alert")).to_contain_text("waves.2")
    dialog.get_by_role("button", name="Cancel").click()
    page.go_forward()
    (model,) = stage.played.get("/models")["models"]
    assert [entry["checkpoint"] for entry in model["versions"]] == [uuid]

    version.get_by_role("button", name="aliases").click()
    dialog.get_by_label("aliases").fill("production candidate")
    dialog.get_by_role("button", name="save").click()
    expect(version.locator(".badge")).to_have_text(["candidate", "production"])
    version.get_by_role("button", name="aliases").click()
    dialog.get_by_label("aliases").fill("production canary 7 a/b")
    dialog.get_by_role("button", name="save").click()
    expect(dialog.get_by_role("alert")).to_contain_text("must have a character that is no digit")
    expect(dialog.get_by_role("alert")).to_contain_text("got 'a/b'")
    (model,) = stage.played.get("/models")["models"]
    assert model["versions"][0]["aliases"] == ["candidate", "production"]
    dialog.get_by_label("aliases").fill("production")
    dialog.get_by_role("button", name="save").click()
    expect(version.locator(".badge")).to_have_text(["production"])
    version.get_by_role("button", name="remove").click()
    dialog.get_by_role("button", name="remove").click()
    expect(page.get_by_text("No versions yet")).to_be_visible()
    page.get_by_role("link", name="Models", exact=True).click()
    page.get_by_role("link", name="waves.2").click()
    page.get_by_role("button", name="remove").click()
    dialog.get_by_role("button", name="remove").click()
    expect(page.get_by_text("No models yet")).to_be_visible()
    assert stage.played.get("/models")["models"] == []
    spectator.faults.clear()  # the browser logs the 422


def test_filters_of_one_checkpoint_can_be_reset(stage: Stage, spectator: Watched) -> None:
    """Others were deleted after the filters were set."""
    (trial,) = stage.trials(stage.long)
    uuid = stage.played.trial(trial)["latest_checkpoint"]
    page = spectator.show(f"#/trials/{trial}/checkpoints?saved_state=ACTIVE&best=1&bound=%3C0.1")
    row = page.get_by_role("row").filter(has_text=uuid)
    expect(page.get_by_text("No matches.")).to_be_visible()
    page.get_by_label("limit of loss").fill("")
    page.get_by_label("Only best").click()  # it disappears
    page.get_by_label("state", exact=True).select_option("")
    expect(row).to_be_visible()
    expect(page.get_by_label("limit of loss")).to_have_count(0)
