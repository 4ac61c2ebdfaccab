"""Media of trials in the page: panels of each kind, the slider, and trials beside each other."""

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, expect

from tests.end_to_end.installation import Installation
from tests.web.conftest import Watched

pytestmark = [pytest.mark.browser, pytest.mark.processes, pytest.mark.needs_extension("media")]

SCRIPT = """
import numpy as np
import zerolab.core
black, white = np.zeros((1, 2)), np.ones((1, 2))
with zerolab.core.init() as context:
    train = context.train
    for step in (10, 20, 30):
        train.report_training_metrics(step, {"loss": 1 / step})
        train.report_image("images", [black, white], caption=[f"a{step}", f"b{step}"])
        train.report_histogram("weights", [step, 2.0 * step], bins=4)
    train.report_table("scores", [{"class": "b", "n": 9}, {"class": "a", "n": 10}])
    train.report_image("many", [black] * 13)
    train.report_text("sample", "<b>text</b>")
    train.report_audio("tone", [0.0] * 800, sample_rate=8000)
    open("page.html", "w").write("<script>document.title = 'owned'</script>")
    train.report_file("page", "page.html")
    train.report_validation_metrics(30, {"loss": context.train.get_hparams()["lr"]})
"""


@pytest.fixture(scope="module")
def installation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    """Installation with one finished experiment of two trials."""
    folder = tmp_path_factory.mktemp("media")
    with Installation.running(folder / "home", slots=2) as running:
        config = {
            "name": "media",
            "entrypoint": "python3 script.py",
            "hyperparameters": {"lr": {"type": "categorical", "vals": [0.1, 0.2]}},
            "searcher": {"name": "grid", "metric": "loss", "max_length": {"batches": 30}},
        }
        running.wait_for(running.submit(folder / "model", config, {"script.py": SCRIPT}))
        yield running


@pytest.fixture
def viewer(installation: Installation, chromium: Browser) -> Iterator[Watched]:
    """Browser signed in; the test fails on errors in the page."""
    context = chromium.new_context()
    watched = Watched(context.new_page(), installation.client.url)
    watched.watch()
    watched.page.goto(installation.client.login_link())
    yield watched
    context.close()
    assert watched.faults == []


def test_trial_shows_media_of_every_kind(viewer: Watched) -> None:
    page = viewer.show("#/trials/1/media")

    images = page.get_by_role("figure", name="images", exact=True)
    image = images.get_by_role("img", name="b30")
    expect(image).to_be_visible()
    assert (
        image.evaluate("async image => { await image.decode(); return image.naturalWidth; }") == 2
    )
    page.get_by_role("slider", name="batch", exact=True).fill("15")
    expect(images.get_by_role("img")).to_have_count(2)
    expect(images.get_by_role("img", name="a10")).to_be_visible()
    expect(page.get_by_role("figure", name="scores")).to_contain_text("None up to batch 15.")
    page.reload()  # the address has the step
    expect(images.get_by_role("img", name="a10")).to_be_visible()
    page.get_by_role("slider", name="batch", exact=True).fill("30")

    scores = page.get_by_role("figure", name="scores", exact=True)
    rows = scores.locator("tbody tr")
    expect(rows.first).to_contain_text("b")
    sort = scores.get_by_role("columnheader").nth(1).get_by_role("button")
    sort.click()
    expect(rows).to_have_text(["b9", "a10"])
    sort.click()
    expect(rows).to_have_text(["a10", "b9"])
    scores.get_by_role("searchbox").fill("b")
    expect(rows).to_have_text(["b9"])
    expect(page.get_by_role("figure", name="sample", exact=True).locator("pre")).to_have_text(
        "<b>text</b>"
    )
    weights = page.get_by_role("figure", name="weights", exact=True)
    expect(weights.get_by_role("img", name="3 histograms from batch 10 to 30")).to_be_visible()
    expect(weights.get_by_role("img", name="histogram at batch 30")).to_be_visible()
    audio = page.get_by_role("figure", name="tone", exact=True).locator("audio")
    loaded = "audio => new Promise(done => { audio.onloadedmetadata = done; audio.load(); "
    audio.evaluate(f"{loaded} audio.preload = 'auto'; }})")
    assert audio.evaluate("audio => audio.duration") == pytest.approx(0.1)
    with page.expect_download() as download:
        page.get_by_role("link", name="page.html").click()
    assert download.value.suggested_filename == "page.html"
    assert "owned" in download.value.path().read_text()


def test_trials_are_shown_side_by_side(viewer: Watched) -> None:
    for address in ("#/experiments/1/media", "#/experiments/1/media/2,1"):
        page = viewer.show(address)
        images = page.get_by_role("figure", name="images", exact=True)
        expect(images.get_by_role("link", name="trial", exact=False)).to_have_count(2)
        expect(images.get_by_role("img", name="a30")).to_have_count(2)
        many = page.get_by_role("figure", name="many", exact=True)
        expect(many.get_by_role("img")).to_have_count(24)  # 12 of each trial
        many.get_by_role("button", name="Show all 13").first.click()
        expect(many.get_by_role("img")).to_have_count(25)
    page = viewer.show("#/compare/1")
    expect(page.get_by_role("figure", name="images", exact=True)).to_be_visible()
