"""Fixtures: installations with experiments of every kind, and a real browser."""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import (
    Browser,
    ConsoleMessage,
    Page,
    Request,
    ViewportSize,
    expect,
    sync_playwright,
)

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
        context.train.report_training_metrics(0, {"loss": 1.0})  # needed for a restart
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


VIEWPORT: ViewportSize = {"width": 1280, "height": 720}


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
    """Installation and its experiments."""

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
    """Server with a simulated agent: many trials, long curves, failures."""
    _needs_page()
    with staged(tmp_path_factory.mktemp("stage")) as running:
        yield running


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Installation with a completed, a failed, a long and a grid experiment."""
    _needs_page()
    folder = tmp_path_factory.mktemp("web")
    with Installation.running(folder / "home", slots=3) as installation:
        filled = Site(installation, folder, digits=0, failed=0, long=0, grid=0)
        filled.failed = filled.submit_script("broken", what="fail")
        shutil.copytree(EXAMPLE, folder / "digits", ignore=shutil.ignore_patterns("__pycache__"))
        submitted = installation.quick("submit", folder / "digits" / "smoke.yaml")
        filled.digits = int(submitted.stdout)
        filled.long = filled.submit_script("long", what="long")
        slopes = {"type": "categorical", "vals": [20, 3, 100]}
        filled.grid = filled.submit_script("grid", searcher="grid", what="grid", slope=slopes)
        for experiment_id in (filled.failed, filled.digits, filled.long, filled.grid):
            installation.wait_for(experiment_id)
        yield filled


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """Browser whose expectations use the tests' deadline."""
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
    """Page that records errors and requests to other servers."""

    page: Page
    url: str
    faults: list[str] = field(default_factory=list)

    def watch(self) -> None:
        """Record errors and requests to other servers."""
        self.page.set_default_timeout(1000 * DEADLINE_S)
        for event, handler in self._handlers:
            self.page.on(event, handler)  # type: ignore[call-overload]

    def unwatch(self) -> None:
        """Record no more."""
        for event, handler in self._handlers:
            self.page.remove_listener(event, handler)

    @property
    def _handlers(self) -> list[tuple[str, Any]]:
        return [("console", self._console), ("pageerror", self._error), ("request", self._request)]

    def _error(self, error: Exception) -> None:
        self.faults.append(str(error))

    def _console(self, message: ConsoleMessage) -> None:
        # Violations of the content policy count as errors. Chromium asks for an icon of /healthz,
        # and its error may arrive after the test has begun.
        if message.type == "error" and not message.location["url"].endswith("/favicon.ico"):
            self.faults.append(message.text)

    def _request(self, request: Request) -> None:
        if not request.url.startswith((self.url + "/", "data:", "blob:")):
            self.faults.append(f"a request to {request.url}")

    def show(self, address: str) -> Page:
        """Open an address of the page."""
        self.page.goto(f"{self.url}/{address}")
        return self.page


class Tab:
    """Tab that the tests of a module share, since opening one takes almost a second.

    Args:
        browser: Browser in which it is opened.
        url: Address of the server.
    """

    def __init__(self, browser: Browser, url: str) -> None:
        self._context = browser.new_context()
        self._url = url
        self._page: Page | None = None

    def watched(self) -> Watched:
        """Return the tab without stored data, settings or handlers of an earlier test."""
        if self._page is None or self._page.is_closed():
            self._page = self._context.new_page()
        page = self._page
        page.goto(f"{self._url}/healthz")  # of the same origin, and not the web page
        page.evaluate("localStorage.clear(); sessionStorage.clear()")
        page.set_viewport_size(VIEWPORT)
        page.emulate_media(color_scheme="light")
        watched = Watched(page, self._url)
        watched.watch()
        return watched

    def release(self, watched: Watched) -> None:
        """Remove the handlers of a test; fail if the page had errors."""
        watched.unwatch()
        self._context.clear_permissions()
        if not watched.page.is_closed():
            watched.page.unroute_all(behavior="ignoreErrors")
            watched.page.goto("about:blank")  # no more requests
        assert watched.faults == []

    def sign_out(self) -> None:
        """Forget the session."""
        self._context.clear_cookies()

    def close(self) -> None:
        """Close it."""
        self._context.close()


@pytest.fixture(scope="module")
def site_tab(site: Site, chromium: Browser) -> Iterator[Tab]:
    """Tab for the pages of ``site``."""
    tab = Tab(chromium, site.url)
    yield tab
    tab.close()


@pytest.fixture
def stranger(site_tab: Tab) -> Iterator[Watched]:
    """Browser without a session."""
    site_tab.sign_out()
    watched = site_tab.watched()
    yield watched
    watched.faults.clear()  # refused requests are errors
    site_tab.release(watched)


@pytest.fixture
def owner(site: Site, site_tab: Tab) -> Iterator[Watched]:
    """Browser signed in by the link; the test fails on errors in the page."""
    site_tab.sign_out()
    watched = site_tab.watched()
    watched.page.goto(site.installation.client.login_link())
    yield watched
    site_tab.release(watched)


@pytest.fixture(scope="module")
def stage_tab(stage: Stage, chromium: Browser) -> Iterator[Tab]:
    """Tab signed in at ``stage``."""
    tab = Tab(chromium, stage.url)
    watched = tab.watched()
    watched.page.goto(stage.login_link())
    tab.release(watched)
    yield tab
    tab.close()


@pytest.fixture
def spectator(stage_tab: Tab) -> Iterator[Watched]:
    """Browser signed in at ``stage``; the test fails on errors in the page."""
    watched = stage_tab.watched()
    yield watched
    stage_tab.release(watched)
