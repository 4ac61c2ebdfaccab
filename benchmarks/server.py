"""How fast the server is: ingest, single reports, charts, lists, start. Against a real process.

    python benchmarks/server.py [--database postgresql://...] [--quick]

Goals are those of the design; ``ok`` says whether this machine, now, reaches them.
"""

import argparse
import json
import os
import shutil
import socket
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import msgspec
import psutil

from zerolab.client.archive import pack
from zerolab.client.http import Client
from zerolab.contract.wire import (
    MSGPACK,
    AgentRegistration,
    MetricsRecord,
    ReportBatch,
    SlotInfo,
)

POINTS = 1_000_000
TRIALS = 10_000
BATCH = 1000
CLIENTS = 8
DATABASE = "zerolab.db"


class Server:
    """A server process on a fresh data directory."""

    def __init__(self, home: Path, arguments: list[str]) -> None:
        self.home = home
        self.arguments = arguments
        self.start_s = self._start()
        self.url = json.loads((home / "server.json").read_text())["url"]
        self.token = (home / "token").read_text().strip()

    def _start(self) -> float:
        command = [sys.executable, "-m", "zeroserver", "--home", str(self.home), "--port", "0"]
        begin = time.perf_counter()
        log = (self.home.parent / "log").open("ab")
        self.process = subprocess.Popen([*command, *self.arguments], stdout=log, stderr=log)
        while not (self.home / "server.json").exists():
            if self.process.poll() is not None:
                sys.exit((self.home.parent / "log").read_text())
            time.sleep(0.002)
        return time.perf_counter() - begin

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait()

    def memory_mb(self) -> float:
        return psutil.Process(self.process.pid).memory_full_info().pss / 2**20

    def http(self) -> httpx.Client:
        headers = {"Authorization": f"Bearer {self.token}"}
        return httpx.Client(base_url=self.url + "/api/v1", headers=headers, timeout=120)


def submit(server: Server, directory: Path, name: str, trials: int) -> int:
    (directory / "model_def.py").write_text("class Trial: ...\n")
    config = {
        "name": name,
        "entrypoint": "model_def:Trial",
        "hyperparameters": {"x": {"type": "double", "minval": 0, "maxval": 1}},
        "searcher": {
            "name": "random", "metric": "loss", "max_length": 100, "max_trials": trials,
            "max_concurrent_trials": 0,
        },
    }  # fmt: skip
    client = Client(server.url, server.token)
    return int(client.create_experiment(config, pack(directory))["id"])


def ingest(server: Server, runs: list[int], batches: int) -> float:
    """Send batches of 1,000 points on as many connections as runs; return points a second."""
    bodies = [
        msgspec.msgpack.encode(
            ReportBatch(
                1 + number * BATCH,
                [
                    MetricsRecord("training", number * BATCH + k, {"loss": float(k)}, 1.8e9 + k)
                    for k in range(BATCH)
                ],
            )
        )
        for number in range(batches)
    ]

    return len(runs) * batches * BATCH / together(server, runs, bodies)


def singles(server: Server, runs: list[int], count: int) -> float:
    """Send reports of one metric, one by one; return reports a second."""

    bodies = [
        msgspec.msgpack.encode(
            ReportBatch(number + 1, [MetricsRecord("training", number, {"loss": 1.0}, 1.8e9)])
        )
        for number in range(count)
    ]
    return len(runs) * count / together(server, runs, bodies)


def together(server: Server, runs: list[int], bodies: list[bytes]) -> float:
    """Send the bodies to each run on a connection of its own; return the seconds it took."""

    def send(run_id: int) -> None:
        # A bare socket: a client library would cost more than the server.
        place = urlsplit(server.url)
        assert place.hostname is not None
        with socket.create_connection((place.hostname, place.port)) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for body in bodies:
                head = (
                    f"POST /api/v1/runs/{run_id}/reports HTTP/1.1\r\nHost: {place.netloc}\r\n"
                    f"Authorization: Bearer {server.token}\r\nContent-Type: {MSGPACK}\r\n"
                    f"Content-Length: {len(body)}\r\n\r\n"
                )
                connection.sendall(head.encode() + body)
                answer = connection.recv(65536)
                while b'"stored"' not in answer or not answer.endswith(b"}"):
                    more = connection.recv(65536)
                    assert more, answer
                    answer += more
                assert answer.startswith(b"HTTP/1.1 200"), answer

    threads = [threading.Thread(target=send, args=(run_id,)) for run_id in runs]
    begin = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - begin


def reading_ms(http: httpx.Client, path: str, **params: object) -> float:
    times = []
    for _ in range(15):
        begin = time.perf_counter()
        http.get(path, params=params).raise_for_status()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[2:]) * 1000


def fill_trials(server: Server, experiment_id: int) -> None:
    """Give the trials states and metrics, straight into the file: only reading is measured."""
    with sqlite3.connect(server.home / DATABASE) as connection:
        connection.execute(
            "UPDATE trials SET best_validation = abs(random()) / 9.3e18, latest_validation = 0.5, "
            "state = CASE id % 3 WHEN 0 THEN 'ERROR' ELSE 'COMPLETED' END, steps_completed = 100 "
            "WHERE experiment_id = ?",
            (experiment_id,),
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--database", default="", help="postgresql://..., else SQLite")
    parser.add_argument("--synchronous", default="full", help="SQLite: full or normal")
    parser.add_argument("--quick", action="store_true", help="a tenth of everything")
    options = parser.parse_args()
    part = 10 if options.quick else 1
    directory = Path(tempfile.mkdtemp(prefix="zerolab-bench-"))
    (directory / "model").mkdir()
    (directory / "home").mkdir()
    database = ["--database", options.database] if options.database else []
    server = Server(directory / "home", [*database, "--synchronous", options.synchronous])
    try:
        rows = measure(server, directory / "model", part)
    finally:
        server.stop()
        shutil.rmtree(directory)
    width = max(len(name) for name, *_ in rows)
    for name, value, unit, goal, good in rows:
        mark = "" if good is None else ("ok" if good else "BELOW THE GOAL")
        sys.stdout.write(f"{name:<{width}}  {value:>12,.1f} {unit:<10} {goal:<22} {mark}\n")
    sys.stdout.write(f"({os.cpu_count()} cores, load {os.getloadavg()[0]:.1f})\n")


Row = tuple[str, float, str, str, bool | None]


def measure(server: Server, model: Path, part: int) -> list[Row]:
    rows: list[Row] = []

    def at_least(name: str, value: float, unit: str, goal: float) -> None:
        rows.append((name, value, unit, f">= {goal:,.0f}", value >= goal))

    def at_most(name: str, value: float, unit: str, goal: float) -> None:
        rows.append((name, value, unit, f"<= {goal:,.1f}", value <= goal))

    at_most("start, fresh data", server.start_s * 1000, "ms", 800)
    at_most("idle memory (PSS)", server.memory_mb(), "MB", 90)
    client = Client(server.url, server.token)
    submit(server, model, "ingest", 2 + 2 * CLIENTS)
    slots = [SlotInfo(number, "cpu") for number in range(2 + 2 * CLIENTS)]
    agent = client.register_agent(AgentRegistration("bench", "here", slots))
    runs = [item.run_id for item in client.work(agent, 0, 0).runs]
    trials = {item.run_id: item.spec.trial_id for item in client.work(agent, 0, 0).runs}
    batches = POINTS // BATCH // part
    at_least("batches of 1,000, 1 client", ingest(server, runs[:1], batches), "points/s", 150_000)
    many = runs[1 : 1 + CLIENTS]
    rate = ingest(server, many, batches // CLIENTS)
    at_least("batches of 1,000, 8 clients", rate, "points/s", 150_000)
    one = runs[1 + CLIENTS : 2 + CLIENTS]
    at_least("single reports, 1 client", singles(server, one, 1000 // part), "reports/s", 1000)
    rate = singles(server, runs[2 + CLIENTS :], 500 // part)
    at_least("single reports, 8 clients", rate, "reports/s", 3000)
    with server.http() as http:
        path = f"/trials/{trials[runs[0]]}/metrics"
        chart = reading_ms(http, path, group="training", names="loss")
        at_most(f"chart of {batches * BATCH:,} points", chart, "ms", 10)
        begin = time.perf_counter()
        exported = http.get("/experiments/1/metrics/export").content.count(b"\n")
        rate = exported / (time.perf_counter() - begin)
        at_least("export", rate, "points/s", 500_000)
        if (server.home / DATABASE).exists():
            experiment_id = submit(server, model, "many", TRIALS // part)
            fill_trials(server, experiment_id)
            path = f"/experiments/{experiment_id}/trials"
            at_most("trials: newest 100", reading_ms(http, path, sort="-id"), "ms", 5)
            ordered = reading_ms(http, path, sort="best_validation")
            at_most("trials: best 100", ordered, "ms", 5)
            narrowed = reading_ms(http, path, sort="best_validation", state="ERROR")
            at_most("trials: failed, best 100", narrowed, "ms", 10)
    rows.append(("memory after all that (PSS)", server.memory_mb(), "MB", "", None))
    return rows


if __name__ == "__main__":
    main()
