"""Speed of a real server process: ingest, single reports, charts, lists, start.

    python benchmarks/server.py [--database postgresql://...] [--quick]
    python benchmarks/server.py --quick --before DIR      beside another working tree's server

With ``--before`` both servers are there together and take turns at each row, ``--rounds`` times, so
that a disturbance of the machine meets both. A figure is the median of its rounds; "CPU ms" is the
processor time that the server took for one request, which a busy machine disturbs least (the
smallest of the rounds). Goals are those of the design; ``ok`` says whether this machine, now,
reaches them.
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
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import msgspec
import psutil

from zerolab.client.archive import pack
from zerolab.client.http import Client
from zerolab.contract.messages import (
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
READS = 15
STARTING = "start, fresh data"
IDLE = "idle memory (PSS)"
DATABASE = "zerolab.db"
ROOT = Path(__file__).resolve().parent.parent


class Server:
    """A server process on a fresh data directory.

    Args:
        home: Its data directory.
        tree: The working tree whose server it is.
        arguments: Further ones of its command line.
    """

    def __init__(self, home: Path, tree: Path, arguments: list[str]) -> None:
        self.home = home
        home.mkdir(parents=True)
        sources = os.pathsep.join(str(tree / name) for name in ("platform", "trials", "server"))
        command = [sys.executable, "-m", "zeroserver", "--home", str(home), "--port", "0"]
        # An installation has compiled what it imports: so has each tree, from its second start on.
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
        begin = time.perf_counter()
        log = home.with_suffix(".log").open("ab")
        self.process = subprocess.Popen(
            [*command, *arguments],
            stdout=log,
            stderr=log,
            cwd=home,
            env=environment | {"PYTHONPATH": sources},
        )
        while not (home / "server.json").exists():
            if self.process.poll() is not None:
                sys.exit(home.with_suffix(".log").read_text())
            time.sleep(0.002)
        self.start_s = time.perf_counter() - begin
        self.start_cpu_s = self.cpu_s()
        self.url = json.loads((home / "server.json").read_text())["url"]
        self.token = (home / "token").read_text().strip()

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait()

    def memory_mb(self) -> float:
        return psutil.Process(self.process.pid).memory_full_info().pss / 2**20

    def cpu_s(self) -> float:
        """Processor time of all its threads until now."""
        tasks = Path(f"/proc/{self.process.pid}/task").glob("*/schedstat")
        return sum(int(file.read_text().split()[0]) for file in tasks) / 1e9

    def http(self) -> httpx.Client:
        headers = {"Authorization": f"Bearer {self.token}"}
        return httpx.Client(base_url=self.url + "/api/v1", headers=headers, timeout=120)


def submit(server: Server, directory: Path, name: str, trials: int) -> int:
    source = "import zerotrial\n\n\nclass Trial(zerotrial.ZeroTrial): ...\n"
    (directory / "model_def.py").write_text(source)
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


@dataclass
class Subject:
    """A server with an experiment whose runs report, and one of many trials."""

    server: Server
    part: int
    """How much less than everything is done: 1, or 10."""
    http: httpx.Client
    runs: list[int]
    trials: dict[int, int]
    """Run to its trial."""
    agent: int
    many: int = 0
    """The experiment of many trials; 0 where there is none."""
    _sent: dict[int, int] = field(default_factory=dict)
    """Run to how many records it has reported."""

    @classmethod
    def on(cls, server: Server, model: Path, part: int) -> "Subject":
        client = Client(server.url, server.token)
        submit(server, model, "ingest", 2 + 2 * CLIENTS)
        slots = [SlotInfo(number, "cpu") for number in range(2 + 2 * CLIENTS)]
        agent = client.register_agent(AgentRegistration("bench", "here", slots))
        items = client.work(agent, 0, 0).runs
        trials = {item.run_id: item.spec.trial_id for item in items}
        made = cls(server, part, server.http(), list(trials), trials, agent)
        if (server.home / DATABASE).exists():
            made.many = submit(server, model, "many", TRIALS // part)
            made._fill_trials()
        return made

    def _fill_trials(self) -> None:
        """Give the trials states and metrics, straight into the file: only reading is measured."""
        with sqlite3.connect(self.server.home / DATABASE) as connection:
            connection.execute(
                "UPDATE trials SET best_validation = abs(random()) / 9.3e18, "
                "latest_validation = 0.5, steps_completed = 100, "
                "state = CASE id % 3 WHEN 0 THEN 'ERROR' ELSE 'COMPLETED' END "
                "WHERE experiment_id = ?",
                (self.many,),
            )

    def stay(self) -> None:
        """Ask for work, so that the server does not give the agent and its runs up."""
        Client(self.server.url, self.server.token).work(self.agent, 0, 0)

    def batches(self, run: int, count: int) -> list[bytes]:
        """Bodies of batches of 1,000 points that follow what the run has reported."""
        return [self._body(run, BATCH) for _ in range(count)]

    def singles(self, run: int, count: int) -> list[bytes]:
        """Bodies of reports of one metric each."""
        return [self._body(run, 1) for _ in range(count)]

    def _body(self, run: int, points: int) -> bytes:
        first = self._sent.get(run, 0)
        self._sent[run] = first + points
        steps = range(first, first + points)
        records = [MetricsRecord("training", k, {"loss": float(k)}, 1.8e9 + k) for k in steps]
        return msgspec.msgpack.encode(ReportBatch(1 + first, list(records)))

    def together(self, bodies: dict[int, list[bytes]]) -> "Measured":
        """Send bodies to their runs, each on a connection of its own."""
        threads = [threading.Thread(target=self._send, args=each) for each in bodies.items()]
        cpu, begin = self.server.cpu_s(), time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        took, cpu = time.perf_counter() - begin, self.server.cpu_s() - cpu
        count = sum(map(len, bodies.values()))
        return Measured(took / count, cpu / count)

    def _send(self, run: int, bodies: list[bytes]) -> None:
        # A bare socket: a client library would cost more than the server.
        place = urlsplit(self.server.url)
        assert place.hostname is not None
        with socket.create_connection((place.hostname, place.port)) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for body in bodies:
                head = (
                    f"POST /api/v1/runs/{run}/reports HTTP/1.1\r\nHost: {place.netloc}\r\n"
                    f"Authorization: Bearer {self.server.token}\r\nContent-Type: {MSGPACK}\r\n"
                    f"Content-Length: {len(body)}\r\n\r\n"
                )
                connection.sendall(head.encode() + body)
                answer = connection.recv(65536)
                while b'"stored"' not in answer or not answer.endswith(b"}"):
                    more = connection.recv(65536)
                    assert more, answer
                    answer += more
                assert answer.startswith(b"HTTP/1.1 200"), answer

    def read(self, path: str, **params: object) -> "Measured":
        """Ask some times; the first answers warm it up."""
        times, cpu = [], []
        for _ in range(READS):
            used, begin = self.server.cpu_s(), time.perf_counter()
            self.http.get(path, params=params).raise_for_status()
            times.append(time.perf_counter() - begin)
            cpu.append(self.server.cpu_s() - used)
        return Measured(statistics.median(times[2:]), min(cpu))

    def export(self) -> "Measured":
        """Read every point of the first experiment; seconds of one."""
        cpu, begin = self.server.cpu_s(), time.perf_counter()
        points = self.http.get("/experiments/1/metrics/export").content.count(b"\n")
        took, cpu = time.perf_counter() - begin, self.server.cpu_s() - cpu
        return Measured(took / points, cpu)


@dataclass(frozen=True)
class Measured:
    """What one request took, in seconds."""

    took_s: float
    cpu_s: float


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    name: str
    unit: str
    goal: float
    measure: Callable[[Subject], Measured | None]
    """None of a server that cannot do it."""
    each: float = 1.0
    """How many of the unit are in a request; a rate is told."""

    @property
    def is_rate(self) -> bool:
        return self.unit.endswith("/s")

    def value(self, measured: Measured) -> float:
        return self.each / measured.took_s if self.is_rate else measured.took_s * 1000


def rows(part: int) -> Iterator[Row]:
    """What is measured of a server, in this order."""
    batches, singles = POINTS // BATCH // part, 1000 // part

    def many(one: Subject) -> list[int]:
        return one.runs[1 : 1 + CLIENTS]

    def batch(one: Subject, runs: list[int]) -> Measured:
        count = batches // len(runs)
        return one.together({run: one.batches(run, count) for run in runs})

    def single(one: Subject, runs: list[int]) -> Measured:
        count = singles if len(runs) == 1 else singles // 2
        return one.together({run: one.singles(run, count) for run in runs})

    def chart(one: Subject) -> Measured:
        path = f"/trials/{one.trials[one.runs[0]]}/metrics"
        return one.read(path, group="training", names="loss")

    def trials(one: Subject, **how: object) -> Measured:
        return one.read(f"/experiments/{one.many}/trials", **how)

    def below(one: Subject) -> Measured | None:
        how = {"sort": "best_validation", "where": '[["hparams.x", "<", 0.5]]'}
        shown = one.http.get(f"/experiments/{one.many}/trials", params=how).json()["trials"]
        # A server that knows no conditions passes over this one.
        held = all(trial["hparams"]["x"] < 0.5 for trial in shown)
        return trials(one, **how) if held else None

    points, reports = "points/s", "reports/s"
    last = slice(1 + CLIENTS, 2 + CLIENTS)
    rest = slice(2 + CLIENTS, None)
    yield Row("batches of 1,000, 1 client", points, 150_000, lambda s: batch(s, s.runs[:1]), BATCH)
    yield Row("batches of 1,000, 8 clients", points, 150_000, lambda s: batch(s, many(s)), BATCH)
    yield Row("single reports, 1 client", reports, 1000, lambda s: single(s, s.runs[last]))
    yield Row("single reports, 8 clients", reports, 3000, lambda s: single(s, s.runs[rest]))
    yield Row("chart of one metric", "ms", 10, chart)
    yield Row("export", points, 500_000, Subject.export)
    yield Row("an experiment", "ms", 3, lambda s: s.read("/experiments/1"))
    yield Row("trials: newest 100", "ms", 4, lambda s: trials(s, sort="-id"))
    yield Row("trials: best 100", "ms", 4, lambda s: trials(s, sort="best_validation"))
    failed = {"sort": "best_validation", "state": "ERROR"}
    yield Row("trials: failed, best 100", "ms", 6, lambda s: trials(s, **failed))
    by = "hparams.x"
    yield Row("trials: by a hyperparameter", "ms", 6, lambda s: trials(s, sort=by))
    yield Row("trials: below a half of it", "ms", 6, below)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--database", default="", help="postgresql://..., else SQLite")
    parser.add_argument("--synchronous", default="full", help="SQLite: full or normal")
    parser.add_argument("--quick", action="store_true", help="a tenth of everything")
    parser.add_argument("--before", type=Path, metavar="DIR", help="another working tree")
    parser.add_argument("--rounds", type=int, help="turns of each row (1; 5 with --before)")
    parser.add_argument("--rows", default="", help="only those whose name has this in it")
    options = parser.parse_args()
    if options.before and options.database:
        parser.error("--before: needs a database for each, so it goes with SQLite alone")
    trees = {"now": ROOT} | ({"before": options.before.resolve()} if options.before else {})
    directory = Path(tempfile.mkdtemp(prefix="zerolab-bench-"))
    (directory / "model").mkdir()
    try:
        lines = measure(directory, trees, options)
    finally:
        shutil.rmtree(directory)
    for line in lines:
        sys.stdout.write(line.rstrip() + "\n")
    sys.stdout.write(f"({os.cpu_count()} cores, load {os.getloadavg()[0]:.1f})\n")


def measure(directory: Path, trees: dict[str, Path], options: argparse.Namespace) -> list[str]:
    """Measure the server of each tree in turns; return the lines of the table."""
    part = 10 if options.quick else 1
    rounds = options.rounds or (5 if len(trees) > 1 else 1)
    more = ["--database", options.database] if options.database else []
    more += ["--synchronous", options.synchronous]
    table = Table(list(trees))
    servers: list[Server] = []
    try:
        if not options.database and options.rows in STARTING:
            measure_starts(directory, trees, more, table, rounds)
        servers += [Server(directory / name, tree, more) for name, tree in trees.items()]
        subjects = [Subject.on(server, directory / "model", part) for server in servers]
        for row in (each for each in rows(part) if options.rows in each.name):
            for _ in range(rounds):
                for name, subject in zip(trees, subjects, strict=True):
                    measured = _one(row, subject)
                    if measured is not None:
                        table.note(row.name, name, row.value(measured), measured.cpu_s)
        for name, server in zip(trees, servers, strict=True):
            table.note("memory after all that (PSS)", name, server.memory_mb())
    finally:
        for server in servers:
            server.stop()
    return list(table.lines(part))


def measure_starts(
    directory: Path, trees: dict[str, Path], more: list[str], table: "Table", rounds: int
) -> None:
    """Start fresh servers one after the other; the first of each tree only compiles."""
    for number in range(rounds + 1):
        for name, tree in trees.items():
            fresh = Server(directory / f"{name}-{number}", tree, more)
            if number:
                table.note(STARTING, name, fresh.start_s * 1000, fresh.start_cpu_s)
                table.note(IDLE, name, fresh.memory_mb())
            fresh.stop()


def _one(row: Row, subject: Subject) -> Measured | None:
    """Measure a row; None if the server cannot do it yet, or its database is not a file."""
    if row.name.startswith("trials") and not subject.many:
        return None
    subject.stay()
    try:
        return row.measure(subject)
    except httpx.HTTPStatusError as error:
        if error.response.status_code != 422:
            raise
        return None


class Table:
    """What was measured: by row, then by tree."""

    def __init__(self, names: list[str]) -> None:
        self._names = names
        self._values: dict[str, dict[str, list[float]]] = {}
        self._cpu: dict[str, dict[str, list[float]]] = {}

    def note(self, row: str, name: str, value: float, cpu_s: float | None = None) -> None:
        self._values.setdefault(row, {}).setdefault(name, []).append(value)
        if cpu_s is not None:
            self._cpu.setdefault(row, {}).setdefault(name, []).append(cpu_s * 1000)

    def lines(self, part: int) -> Iterator[str]:
        known = {
            STARTING: ("ms", 800.0, False),
            IDLE: ("MB", 60.0, False),
            "memory after all that (PSS)": ("MB", None, False),
        }
        known |= {row.name: (row.unit, row.goal, row.is_rate) for row in rows(part)}
        yield " " * 36 + "".join(f"{name:>14}{'CPU ms':>9}" for name in self._names) + "   goal"
        for name, (unit, goal, rate) in known.items():
            if name in self._values:
                yield f"{name:<28}{unit:>10} " + self._cells(name, goal, rate)

    def _cells(self, row: str, goal: float | None, rate: bool) -> str:
        values = {name: statistics.median(each) for name, each in self._values[row].items()}
        cpu = {name: min(each) for name, each in self._cpu.get(row, {}).items()}
        text = ""
        for name in self._names:
            text += f"{values[name]:>13,.1f} " if name in values else f"{'-':>13} "
            text += f"{cpu[name]:>8.2f} " if name in cpu else f"{'-':>8} "
        if goal is not None:
            now = values["now"]
            good = now >= goal if rate else now <= goal
            text += f"  {'>=' if rate else '<='} {goal:,.0f} {'ok' if good else 'BELOW THE GOAL'}"
        return text


if __name__ == "__main__":
    main()
