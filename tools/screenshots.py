"""Pictures of the web page for the documentation, from real runs.

``python -m tools.screenshots`` starts a server and an agent with two CPU slots in a temporary data
directory, runs the experiments of ``EXPERIMENTS``, and writes each view of ``VIEWS`` in light and
dark to ``docs/images``. It needs Chromium and takes about ten minutes. ``--home FOLDER`` keeps the
data directory, and a second call takes the pictures without running the experiments again.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml
from PIL import Image
from playwright.sync_api import Page, sync_playwright

from zerolab.client.http import Client
from zerolab.paths import Home, server_url, token_of

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"
WIDTH, HEIGHT, SHORT, SCALE = 1120, 720, 400, 1.5

EXPERIMENTS = (
    ("core_api/smoke.yaml", {"name": "core-api"}),
    ("digits/experiment.yaml", {"description": "An MLP on handwritten digits, ZeRO stage 1"}),
    ("grid/smoke.yaml", {}),
    (
        "tpe_asha/experiment.yaml",
        {"name": "digits-search", "description": "Thirty trials of two kinds of network"},
    ),
)
"""Example and changes of its experiment file."""

VIEWS = {
    "list": "#/",
    "experiment": "#/experiments/2/curves",
    "curves": "#/experiments/4/curves",
    "search": "#/experiments/4/search",
    "hyperparameters": "#/experiments/4/hyperparameters",
    "logs": "#/experiments/2/logs",
    "cluster": "#/cluster",
}
"""Address of each picture."""


def zerolab(home: Path, *arguments: str | Path) -> str:
    """Run a command; return its output."""
    command = [sys.executable, "-m", "zerolab", *map(str, arguments)]
    env = {key: value for key, value in os.environ.items() if not key.startswith("ZEROLAB_")}
    env |= {"ZEROLAB_HOME": str(home), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=env, check=True, stdout=subprocess.PIPE, text=True).stdout


def submit(home: Path, example: str, changes: dict[str, object]) -> int:
    """Submit an example with changes; return the id of the experiment."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "model"
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree((ROOT / "examples" / example).parent, folder, ignore=ignored)
        file = folder / Path(example).name
        config = yaml.safe_load(file.read_text(encoding="utf-8")) | changes
        file.write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
        return int(zerolab(home, "submit", file))


def wait(client: Client, experiment_id: int) -> None:
    """Return when an experiment has ended."""
    while (state := client.experiment(experiment_id)["state"]) not in ("COMPLETED", "ERROR"):
        time.sleep(2)
    if state != "COMPLETED":
        raise RuntimeError(f"experiment {experiment_id}: must be COMPLETED, got {state}")


def take(client: Client, names: list[str]) -> None:
    """Write the pictures of some views."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"]
        )
        for theme in ("light", "dark"):
            context = browser.new_context(
                viewport={"width": WIDTH, "height": HEIGHT}, device_scale_factor=SCALE,
                color_scheme=theme, timezone_id="UTC",
            )  # fmt: skip
            page = context.new_page()
            page.goto(client.login_link())
            for name in names:
                picture(page, client.url, name, theme)
            context.close()
        browser.close()


def picture(page: Page, url: str, name: str, theme: str) -> None:
    """Write the picture of one view in one theme."""
    page.goto(f"{url}/{VIEWS[name]}")
    page.reload()
    page.wait_for_load_state("load")
    page.wait_for_timeout(3000)  # curves and tables are read and drawn
    file = IMAGES / f"{name}-{theme}.png"
    height = SHORT if name in ("list", "cluster") else HEIGHT
    clip = {"x": 0, "y": 0, "width": WIDTH, "height": height}
    page.screenshot(path=file, animations="disabled", clip=clip)
    with Image.open(file) as image:
        small = image.convert("RGB").quantize(64, dither=Image.Dither.NONE)
    small.save(file, optimize=True)
    print(f"{file.relative_to(ROOT)}: {file.stat().st_size / 1024:.0f} KiB")


def main() -> None:
    """Run the experiments and write the pictures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--home", type=Path, help="data directory to keep and to use again")
    parser.add_argument("--views", nargs="+", choices=VIEWS, default=list(VIEWS))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        home = (options.home or Path(temporary) / "home").resolve()
        zerolab(home, "up", "--port", "0", "--slots", "2", "--cpu")
        try:
            client = Client(str(server_url(Home(home))), token_of(Home(home)))
            if not client.experiments():
                for example, changes in EXPERIMENTS:
                    experiment_id = submit(home, example, changes)
                    if experiment_id < len(EXPERIMENTS):
                        wait(client, experiment_id)
                while len(client.trials(experiment_id)) < 5:
                    time.sleep(2)
                take(client, ["cluster"])  # slots are in use
                wait(client, experiment_id)
                options.views = [name for name in options.views if name != "cluster"]
            take(client, options.views)
        finally:
            zerolab(home, "down")


if __name__ == "__main__":
    main()
