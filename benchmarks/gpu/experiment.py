"""Train the digits example through server, agent and launcher; read its metrics over REST.

On a GPU the trial must have run on it, and the system metrics must have the GPU's utilisation,
memory and power, which come from NVML.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from urllib import request

import yaml

from benchmarks.gpu.cases import Cases, parse_step

ROOT = Path(__file__).resolve().parents[2]
GPU_METRICS = ("percent", "memory_used_bytes", "power_watts")


def main() -> None:
    options, cases = parse_step(__doc__)
    with tempfile.TemporaryDirectory(prefix="prove-home-") as home:
        environment = {**os.environ, "ZEROLAB_HOME": home, "HOME": home}
        try:
            prove(Path(home), environment, options, cases)
        except Exception as error:  # noqa: BLE001 - reported as a case
            cases.add_error("experiment", error)
        finally:
            zerolab(environment, "down")


def zerolab(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a ``zerolab`` command from the checkout and log what it prints."""
    done = subprocess.run(
        [sys.executable, "-m", "zerolab", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    print(f"$ zerolab {' '.join(arguments)}\n{done.stdout}{done.stderr}", flush=True)
    return done


def prove(
    home: Path, environment: dict[str, str], options: argparse.Namespace, cases: Cases
) -> None:
    """Run the experiment and report how it ended, its metrics and the page."""
    folder = home / "digits"
    shutil.copytree(ROOT / "examples" / "digits", folder)
    file = folder / "experiment.yaml"
    experiment = yaml.safe_load(file.read_text(encoding="utf-8"))
    experiment["resources"] = {"slots_per_trial": 1}
    # Long enough for several samples of the system metrics, one a second.
    experiment["searcher"]["max_length"] = {"epochs": 60}
    file.write_text(yaml.safe_dump(experiment), encoding="utf-8")

    began = time.monotonic()
    cpu = ["--cpu"] * options.rehearse
    done = zerolab(environment, "run", str(file), "--port", "0", *cpu)
    cases.add("run digits", ok=done.returncode == 0, seconds=time.monotonic() - began)
    if done.returncode:
        return
    trial = read(environment, "/api/v1/trials/1")["trial"]
    validation = read(environment, "/api/v1/trials/1/metrics?group=validation")
    accuracy = last_values(validation).get("accuracy", 0.0)
    cases.add("accuracy", ok=accuracy > 0.9, state=trial["state"], accuracy=accuracy)

    system = last_values(read(environment, "/api/v1/trials/1/metrics?group=system"))
    cases.add("system metrics", ok="cpu_percent" in system, names=", ".join(sorted(system)[:6]))
    if not options.rehearse:
        figures = {name: system.get(f"gpu0_{name}") for name in GPU_METRICS}
        cases.add("GPU metrics from NVML", ok=None not in figures.values(), **figures)

    url = zerolab(environment, "status", "--url").stdout.strip()
    if (ROOT / "server" / "zeroserver" / "static" / "index.html").exists():
        with request.urlopen(url) as response:
            page = response.read()
        cases.add("web page", ok=b"<div" in page, nbytes=len(page))
    else:
        cases.add("web page", note="not built in this checkout: run make web and copy it along")


def read(environment: dict[str, str], path: str) -> Any:
    """Read a route of the server with the installation's token."""
    url = zerolab(environment, "status", "--url").stdout.strip()
    token = subprocess.run(
        [sys.executable, "-m", "zerolab", "token"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    call = request.Request(url + path, headers={"Authorization": f"Bearer {token}"})
    with request.urlopen(call) as response:
        return json.load(response)


def last_values(metrics: Any) -> dict[str, float]:
    """Return the last value of each curve."""
    return {curve["name"]: curve["points"][-1][1] for curve in metrics["metrics"]}


if __name__ == "__main__":
    main()
