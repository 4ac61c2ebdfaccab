"""A real installation with experiments of every kind, and a real browser that looks at it."""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, Request, expect, sync_playwright

from tests.end_to_end.installation import Installation
from tests.waiting import DEADLINE_S
from tests.web.stage import Stage, staged
from zeroserver.app import STATIC

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "digits"

SCRIPT = """
import math
import time
from pathlib import Path

import zerolab.core

with zerolab.core.init() as context:
    hparams = context.train.get_hparams()
    what = hparams["what"]
    if what == "fail":
        context.train.report_training_metrics(0, {"loss": 1.0})  # or it is not restarted
        raise RuntimeError("the model is broken")
    if what == "wait":
        for step in range(1, 21):
            if step == 11:
                while not Path(hparams["gate"]).exists():
                    time.sleep(0.05)
            context.train.report_training_metrics(step, {"loss": 1 / step})
        context.train.report_validation_metrics(20, {"holey": 1.0})
    if what == "grid":
        for step in range(1, 6):
            context.train.report_training_metrics(step, {"loss": hparams["slope"] / step})
        context.train.report_validation_metrics(5, {"holey": hparams["slope"]})
    if what == "long":
        for step in range(1, 3001):
            context.train.report_training_metrics(step, {"noisy": 5.0 if step % 3 == 0 else 0.0})
        for step in range(1, 11):
            value = math.nan if step in (3, 7) else step / 10
            context.train.report_validation_metrics(step, {"holey": value})
"""

BROWSER_ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]


def script_config(name: str, searcher: str = "single", **hparams: Any) -> dict[str, Any]:
    """Return the experiment file of a script that needs no torch."""
    return {
        "name": name,
        "entrypoint": "python3 script.py",
        "hyperparameters": hparams,
        "searcher": {"name": searcher, "metric": "holey", "max_length": {"batches": 20}},
        "resources": {"slots_per_trial": 1},
        "max_restarts": 1,
    }


@dataclass
class Site:
    """An installation, and the experiments in it."""

    installation: Installation
    folder: Path
    digits: int
    failed: int
    long: int
    grid: int

    @property
    def url(self) -> str:
        """Address of the server."""
        return self.installation.client.url

    def submit_script(self, name: str, searcher: str = "single", **hparams: Any) -> int:
        """Submit a run of the script; return the experiment's id."""
        config = script_config(name, searcher, **hparams)
        return self.installation.submit(self.folder / name, config, {"script.py": SCRIPT})


def _needs_page() -> None:
    if not (STATIC / "index.html").is_file():
        pytest.fail("the page is not built: run `npm ci && npm run build` in server/web")


@pytest.fixture(scope="session")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """A server whose agent was played: many trials, long curves, and what goes wrong."""
    _needs_page()
    with staged(tmp_path_factory.mktemp("stage")) as made:
        yield made


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """One experiment that completed, one that failed, one with broken curves, one with trials."""
    _needs_page()
    folder = tmp_path_factory.mktemp("web")
    with Installation.running(folder / "home", slots=3) as installation:
        made = Site(installation, folder, digits=0, failed=0, long=0, grid=0)
        made.failed = made.submit_script("broken", what="fail")
        shutil.copytree(EXAMPLE, folder / "digits", ignore=shutil.ignore_patterns("__pycache__"))
        submitted = installation.cli("submit", folder / "digits" / "smoke.yaml")
        made.digits = int(submitted.stdout)
        made.long = made.submit_script("long", what="long")
        slopes = {"type": "categorical", "vals": [20, 3, 100]}
        made.grid = made.submit_script("grid", searcher="grid", what="grid", slope=slopes)
        for experiment_id in (made.failed, made.digits, made.long, made.grid):
            installation.wait_for(experiment_id)
        yield made


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """A browser; its expectations wait as long as anything else."""
    expect.set_options(timeout=1000 * DEADLINE_S)
    with sync_playwright() as playwright:
        path = shutil.which("chromium") or shutil.which("chromium-browser")
        browser = playwright.chromium.launch(
            executable_path=path, args=BROWSER_ARGUMENTS, timeout=1000 * DEADLINE_S
        )
        yield browser
        browser.close()


@dataclass
class Watched:
    """A page, and everything about it that must not happen."""

    page: Page
    url: str
    faults: list[str] = field(default_factory=list)

    def watch(self) -> None:
        """Note errors, and requests that leave the server."""
        self.page.set_default_timeout(1000 * DEADLINE_S)
        self.page.on("console", self._console)
        self.page.on("pageerror", lambda error: self.faults.append(str(error)))
        self.page.on("request", self._request)

    def _console(self, message: ConsoleMessage) -> None:
        if message.type == "error":  # what the content policy forbids is one, too
            self.faults.append(message.text)

    def _request(self, request: Request) -> None:
        if not request.url.startswith((self.url + "/", "data:", "blob:")):
            self.faults.append(f"a request to {request.url}")

    def show(self, address: str) -> Page:
        """Go to an address behind ``#`` of the page."""
        self.page.goto(f"{self.url}/{address}")
        return self.page


@pytest.fixture
def stranger(site: Site, chromium: Browser) -> Iterator[Watched]:
    """A browser that is not signed in."""
    context = chromium.new_context()
    watched = Watched(context.new_page(), site.url)
    watched.watch()
    yield watched
    context.close()


@pytest.fixture
def owner(site: Site, stranger: Watched) -> Iterator[Watched]:
    """A browser that came through the link; nothing goes wrong in it."""
    stranger.page.goto(site.installation.client.login_link())
    yield stranger
    assert stranger.faults == []


@pytest.fixture
def spectator(stage: Stage, chromium: Browser) -> Iterator[Watched]:
    """A browser that is signed in at the stage; nothing goes wrong in it."""
    context = chromium.new_context()
    watched = Watched(context.new_page(), stage.url)
    watched.watch()
    watched.page.goto(stage.login_link())
    yield watched
    context.close()
    assert watched.faults == []
