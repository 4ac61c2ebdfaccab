"""Metrics of the server, and the dashboard of Grafana that reads them."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.access.test_users import add_user, ask
from tests.server.helpers import Server
from tests.server.processes import played
from tests.waiting import free_port, until

PAGE = Path(__file__).parents[2] / "docs" / "how_to" / "monitoring.md"
DASHBOARD = PAGE.with_name("grafana.json")


def expressions() -> list[str]:
    """Return all queries of the dashboard."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel["targets"]]


def numbers(server: Server) -> dict[str, float]:
    text = server.http.get("/metrics").text
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


def test_metrics_count_slots_queue_and_requests(server: Server) -> None:
    ann = add_user(server, "ann", "member")
    server.submit(resources={"slots_per_trial": 2})
    ask(server, ann, "POST", "/experiments/1/fork", json={}).raise_for_status()
    server.add_agent(3)
    server.post("/agents/1/disable", {"slots": [2], "drain": True})
    metrics = numbers(server)
    slots = {name: value for name, value in metrics.items() if name.startswith("zerolab_slots{")}
    assert slots == {
        'zerolab_slots{pool="default",state="disabled",user=""}': 1,
        'zerolab_slots{pool="default",state="used",user="admin"}': 2,
    }
    assert metrics['zerolab_queued_trials{pool="default",user="ann"}'] == 1
    assert metrics['zerolab_queued_slots{pool="default",user="ann"}'] == 2
    labels = 'method="POST",route="/api/v1/experiments/{experiment_id}/fork"'
    name = "zerolab_http_request_duration_seconds"
    assert metrics[f"{name}_count{{{labels}}}"] == 1
    assert metrics[f'{name}_bucket{{{labels},le="+Inf"}}'] == 1
    assert metrics[f'{name}_bucket{{{labels},le="0.005"}}'] <= 1
    server.work(1)
    assert not any("/work" in key for key in numbers(server))  # it waits for a change


def test_dashboard_and_page_name_existing_metrics(sqlite_server: Server) -> None:
    sqlite_server.submit()
    text = sqlite_server.http.get("/metrics").text
    declared = set(re.findall("^# TYPE (\\w+)", text, re.MULTILINE))
    page = set(re.findall(r"`(zerolab_\w+)`", PAGE.read_text()))
    assert page == declared
    used = {name for expr in expressions() for name in re.findall(r"zerolab_\w+", expr)}
    assert {re.sub("_(bucket|count|sum)$", "", name) for name in used} <= declared


@pytest.fixture
def prometheus(tmp_path: Path) -> Iterator[tuple[httpx.Client, Server]]:
    """A real Prometheus that reads a real server."""
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("needs the program prometheus (package `prometheus` of Debian)")
    with played(tmp_path) as (live, server):
        (scrape,) = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)[:1]
        scrape = scrape.replace("https", "http").replace(
            "zerolab.example.org:8443", live.url.removeprefix("http://")
        )
        scrape = scrape.replace("/etc/prometheus/zerolab.token", str(live.home / "token"))
        file = tmp_path / "prometheus.yml"
        file.write_text("global: {scrape_interval: 1s}\n" + scrape)
        port = free_port()
        command = [
            program, f"--config.file={file}", f"--storage.tsdb.path={tmp_path / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
        ]  # fmt: skip
        with (tmp_path / "prometheus.log").open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}/api/v1") as http:
                yield http, server
        finally:
            process.terminate()
            process.wait()


@pytest.mark.processes
def test_prometheus_evaluates_dashboard(prometheus: tuple[httpx.Client, Server]) -> None:
    http, server = prometheus
    server.submit(resources={"slots_per_trial": 2})
    server.submit(resources={"slots_per_trial": 2})
    server.add_agent(2)

    def query(expression: str) -> Any:
        try:
            response = http.get("/query", params={"query": expression})
        except httpx.TransportError:
            return None
        assert response.status_code == 200, (expression, response.text)
        return response.json()["data"]["result"]

    def has_rates() -> bool:
        expression = "rate(zerolab_http_request_duration_seconds_count[1m]) > 0"
        return bool(query('zerolab_slots{state="used"}') and query(expression))

    until("Prometheus has two samples", has_rates)
    for expression in expressions():
        assert query(expression.replace("$__rate_interval", "1m")) != [], expression
