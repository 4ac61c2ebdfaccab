"""Database schema, migrations, and failed writes."""

import contextlib
import random
import resource
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import inspect, text

from tests.disks import mounted
from tests.server.conftest import new_database
from tests.server.helpers import (
    Server,
    checkpoint,
    experiment_config,
    model_archive,
    serve,
    training,
)
from tests.server.processes import LiveServer
from tests.waiting import DEADLINE_S, until
from zerolab.contract.messages import AgentRegistration, ReportBatch, SlotInfo
from zerolab.errors import ConfigError, ConflictError, UnreachableError
from zeroserver.store import migrations
from zeroserver.store.database import Database, Transaction
from zeroserver.store.engine_factory import sqlite_url
from zeroserver.store.migrate import migrate, upgrade
from zeroserver.store.schema import HEAD, metadata


def opened(url: str) -> Database:
    return Database(url, lambda _changes: None)


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.processes)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """URL of an empty database on each backend."""
    if request.param == "sqlite":
        return sqlite_url(tmp_path / "zerolab.db")
    return new_database(request.getfixturevalue("postgresql"))


@pytest.fixture
def database(url: str) -> Iterator[Database]:
    """A database with its tables and its writer."""
    database = opened(url)
    migrate(database)
    database.start()
    yield database
    database.close()


def test_migrations_create_expected_tables(url: str) -> None:
    database = opened(url)
    with database.writer_engine.begin() as connection:
        upgrade(connection)
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, metadata) == []
        assert context.get_current_revision() == HEAD
    migrate(database)
    database.close()


def test_new_database_equals_migrated_one(tmp_path: Path) -> None:
    databases = []
    for way in (migrate, _upgraded):
        database = opened(sqlite_url(tmp_path / f"{len(databases)}.db"))
        way(database)
        with database.read() as connection:
            statements = connection.scalars(text("SELECT sql FROM sqlite_master WHERE sql <> ''"))
            databases.append({" ".join(sql.split()) for sql in statements})
        database.close()
    named = [{sql for sql in schema if "alembic_version" not in sql} for schema in databases]
    assert {_words(sql) for sql in named[0]} == {_words(sql) for sql in named[1]}


def _words(sql: str) -> str:
    """Return the parts of a table as a set, since the order of constraints may differ."""
    return " ".join(sorted(sql.replace(",", " ").replace("(", " ").replace(")", " ").split()))


def _upgraded(database: Database) -> None:
    with database.writer_engine.begin() as connection:
        upgrade(connection)


def test_newest_migration_is_expected_version() -> None:
    config = Config()
    config.set_main_option("script_location", str(Path(migrations.__file__).parent))
    assert ScriptDirectory.from_config(config).get_current_head() == HEAD


def test_newer_database_is_unchanged(url: str) -> None:
    database = opened(url)
    migrate(database)
    with database.writer_engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(ConflictError, match=r"has schema 9999.*install the version that wrote it"):
        migrate(database)
    database.close()


def test_unreadable_database_is_named(tmp_path: Path) -> None:
    database = opened(sqlite_url(tmp_path / "missing" / "zerolab.db"))
    with pytest.raises(ConfigError, match=r"missing/zerolab\.db"):
        migrate(database)
    database.close()
    database = opened("postgresql://nobody:secret@127.0.0.1:1/none")
    with pytest.raises(ConfigError, match="cannot be opened") as caught:
        migrate(database)
    assert "secret" not in str(caught.value)
    database.close()


def test_foreign_database_is_unchanged(url: str) -> None:
    foreign = "CREATE TABLE experiments (experiment_id INTEGER PRIMARY KEY, lifecycle TEXT)"
    database = opened(url)
    with database.writer_engine.begin() as connection:
        connection.execute(text(foreign))
    with pytest.raises(ConflictError, match=r"tables of another program \(experiments\)"):
        migrate(database)
    with database.writer_engine.begin() as connection:
        connection.execute(text("CREATE TABLE alembic_version (version_num VARCHAR(32))"))
        connection.execute(text(f"INSERT INTO alembic_version VALUES ('{HEAD}')"))
    with pytest.raises(ConflictError, match="has no column"):
        migrate(database)
    with database.writer_engine.begin() as connection:
        tables = inspect(connection).get_table_names()
    assert sorted(tables) == ["alembic_version", "experiments"]
    database.close()


def test_foreign_tables_are_ignored(url: str) -> None:
    database = opened(url)
    with database.writer_engine.begin() as connection:
        connection.execute(text("CREATE TABLE somebodys (id INTEGER PRIMARY KEY)"))
    migrate(database)
    database.close()


@pytest.mark.needs_extension("external_runs")
def test_upgrade_fills_new_columns(tmp_path: Path) -> None:
    with serve(tmp_path) as server:
        server.submit(max_restarts=0)
        server.submit(activate=False)
        server.add_agent()
        server.exit(server.begin().run_id, 1)
        server.act("kill", 2)
        server.post("/external-runs", {"id": "abc", "session": "s1"})
        path = server.services.orchestrator.home.database
    database = opened(sqlite_url(path))
    with database.writer_engine.begin() as connection:
        config = Config()
        config.set_main_option("script_location", str(Path(migrations.__file__).parent))
        config.attributes["connection"] = connection
        command.downgrade(config, "0015")
    database.close()
    with serve(tmp_path) as server:
        experiments = [server.experiment(number) for number in (1, 2)]
        counts = [(row["failed_trials"], row["canceled_trials"]) for row in experiments]
        assert counts == [(1, 0), (0, 1)]
        assert server.sql("SELECT id FROM experiments WHERE external_id = 'abc'") == [(3,)]


@pytest.mark.needs_extension("model_registry", "projects", "users")
@pytest.mark.parametrize(
    "kind", ["sqlite", pytest.param("postgresql", marks=pytest.mark.processes)]
)
def test_upgrade_gives_everything_to_admin(
    tmp_path: Path, request: pytest.FixtureRequest, kind: str
) -> None:
    """An installation of version 0.2, which knew neither users nor projects."""
    url = new_database(request.getfixturevalue("postgresql")) if kind == "postgresql" else ""
    with serve(tmp_path, url) as server:
        server.submit()
        server.post("/models", {"name": "digits"})
        token, path = server.token, server.services.orchestrator.home.database
    database = opened(url or sqlite_url(path))
    with database.writer_engine.begin() as connection:
        config = Config()
        config.set_main_option("script_location", str(Path(migrations.__file__).parent))
        config.attributes["connection"] = connection
        command.downgrade(config, "0012")  # the schema of version 0.2
    database.close()
    with serve(tmp_path, url) as server:
        assert server.token == token
        assert server.experiment()["owner"] is None  # a single user sees no owner
        assert server.post("/users", {"name": "ann", "role": "member"})["user"]["active"] is True
        assert server.experiment()["owner"] == "admin"
        assert server.get("/models/digits")["model"]["owner"] == "admin"
        assert server.experiment()["project"] is None  # nor a project
        assert server.post("/projects", {"name": "vision"})["project"]["experiments"] == 0
        assert server.experiment()["project"] == "default"
        assert server.get("/models/digits")["model"]["project"] == "default"
        assert server.submit(project="vision")["project"] == "vision"
        users = [(user["name"], user["role"]) for user in server.get("/users")["users"]]
        assert users == [("admin", "admin"), ("ann", "member")]


def test_upgrade_marks_pending_removals(tmp_path: Path) -> None:
    with serve(tmp_path) as server:
        server.submit(checkpoint_storage={"save_trial_best": 0, "save_trial_latest": 1})
        server.add_agent()
        spec = server.begin()
        server.report(spec.run_id, checkpoint(1), checkpoint(2))
        path = server.services.orchestrator.home.database
        retained, removed = (
            server.services.orchestrator.home.checkpoints / checkpoint(n).uuid for n in (2, 1)
        )
    database = opened(sqlite_url(path))
    with database.writer_engine.begin() as connection:
        config = Config()
        config.set_main_option("script_location", str(Path(migrations.__file__).parent))
        config.attributes["connection"] = connection
        command.downgrade(config, "0001")
    database.close()
    for directory in (retained, removed):
        directory.mkdir()
    with serve(tmp_path):
        until("what was deleted goes", lambda: not removed.exists())
    assert retained.is_dir()


def damaged(directory: Path, table: str, last: bool = False) -> Path:
    """Create a database of two trials with reports and overwrite one page of a table.

    Returns:
        The file.
    """
    searcher = {"name": "random", "metric": "loss", "max_length": 9, "max_trials": 2}
    with serve(directory) as server:
        server.submit(searcher=searcher)
        server.add_agent(slots=2)
        for item in server.work():
            many = [training(step, float(step)) for step in range(400)]
            assert server.send(item.run_id, 1, many).is_success
        file = server.services.orchestrator.home.database
        server.sql("PRAGMA wal_checkpoint(TRUNCATE)")
        ((root, size),) = server.sql(
            "SELECT rootpage, (SELECT page_size FROM pragma_page_size()) FROM sqlite_master "
            f"WHERE name = '{table}'"
        )
    content = bytearray(file.read_bytes())
    page = root
    if last:  # the right-most child of an inner page
        page = int.from_bytes(content[(root - 1) * size + 8 : (root - 1) * size + 12], "big")
    content[(page - 1) * size : page * size] = b"\xff" * size
    file.write_bytes(content)
    return file


def failed_start(home: Path) -> tuple[int, str]:
    """Start a server that fails; return its exit code and output."""
    command = [sys.executable, "-m", "zeroserver", "--home", str(home), "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=DEADLINE_S)
    return done.returncode, done.stderr


def test_start_on_full_disk_names_disk_space(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "4m") as disk:
        with serve(disk):
            pass
        with contextlib.suppress(OSError), (disk / "filler").open("wb", buffering=0) as filler:
            while filler.write(bytes(4096)):
                pass
        for _ in range(2):
            code, output = failed_start(disk / "home")
            assert code == 2, output
            assert "free some space on its disk" in output
            assert "Traceback" not in output
        (disk / "filler").unlink()
        with serve(disk) as server:
            assert server.http.get("/healthz").status_code == 200


@pytest.mark.parametrize("table", ["trials", "experiments"])
def test_damaged_tables_are_named_with_remedy(tmp_path: Path, table: str) -> None:
    damaged(tmp_path, table)
    code, output = failed_start(tmp_path / "home")
    assert code == 2
    assert f"is damaged (database disk image is malformed); what cannot be read: {table};" in output
    assert "restore it from a backup" in output
    assert "Traceback" not in output


@pytest.mark.needs_extension("metrics_export")
@pytest.mark.parametrize("form", ["ndjson", "csv"])
def test_export_lists_damage_and_keeps_readable_rows(
    tmp_path: Path, form: str, caplog: pytest.LogCaptureFixture
) -> None:
    damaged(tmp_path, "points", last=True)  # the last page of the second trial's points
    with serve(tmp_path) as server:
        response = server.http.get("/api/v1/experiments/1/metrics/export", params={"format": form})
    assert response.status_code == 200
    lines = response.text.splitlines()
    assert [line for line in lines if "problem" in line] == lines[-1:]
    assert "the database is damaged" in lines[-1]
    expected = '"trial_id":1,' if form == "ndjson" else "1,training"
    assert sum(expected in line for line in lines) == 400
    assert len([record for record in caplog.records if "damaged" in record.getMessage()]) == 1
    assert "Traceback" not in caplog.text


def test_damaged_page_is_reported(tmp_path: Path) -> None:
    damaged(tmp_path, "points")
    with serve(tmp_path) as server:
        response = server.http.get("/api/v1/trials/1/metrics")
        assert (response.status_code, response.json()["error"]["type"]) == (503, "storage")
        assert "the database is damaged" in response.json()["error"]["message"]
        assert server.trial()["steps_completed"] == 399


def test_failed_job_rolls_back_alone(
    database: Database,
) -> None:
    statement = "INSERT INTO metric_keys (id, group_name, name) VALUES (?, 'g', ?)"
    undone = []

    def good(number: int) -> Any:
        return lambda transaction: transaction.run(statement, (number, str(number)))

    def bad(transaction: Transaction) -> None:
        transaction.run(statement, (100, "bad"))
        transaction.undo.append(lambda: undone.append("undo"))
        raise ConflictError("no")

    def broken(transaction: Transaction) -> None:
        transaction.run(statement, (1, "again"))

    blocked = threading.Event()
    first = database.submit(lambda _transaction: blocked.wait(DEADLINE_S))
    jobs = [database.submit(job) for job in (good(1), bad, good(2), broken, good(3))]
    blocked.set()
    assert first.result(DEADLINE_S)
    assert [job.exception(DEADLINE_S) is None for job in jobs] == [True, False, True, False, True]
    assert isinstance(jobs[1].exception(), ConflictError)
    assert undone
    with database.read() as connection:
        ids = list(connection.scalars(text("SELECT id FROM metric_keys ORDER BY id")))
    assert ids == [1, 2, 3]


def test_waiting_jobs_commit_together(database: Database) -> None:
    blocked = threading.Event()
    first = database.submit(lambda _transaction: blocked.wait(DEADLINE_S))
    before = database.groups
    jobs = [database.submit(lambda _transaction: None) for _ in range(50)]
    blocked.set()
    for job in [first, *jobs]:
        job.result(DEADLINE_S)
    assert database.groups - before <= 2
    assert database.jobs >= 51


def test_refused_job_leaves_others_together(database: Database) -> None:
    statement = "INSERT INTO metric_keys (id, group_name, name) VALUES (?, 'g', ?)"
    cache: list[int] = []

    def store(transaction: Transaction) -> None:
        transaction.undo.append(cache.pop)
        cache.append(transaction.run(statement, (len(cache) + 1, str(len(cache)))))

    def refuse(transaction: Transaction) -> None:
        store(transaction)
        raise ConflictError("no")

    blocked = threading.Event()
    first = database.submit(lambda _transaction: blocked.wait(DEADLINE_S))
    before = database.groups
    jobs = [database.submit(job) for job in (store, refuse, store)]
    blocked.set()
    assert first.result(DEADLINE_S)
    assert [job.exception(DEADLINE_S) is None for job in jobs] == [True, False, True]
    assert database.groups - before <= 2
    assert cache == [1, 1]
    with database.read() as connection:
        ids = list(connection.scalars(text("SELECT id FROM metric_keys ORDER BY id")))
    assert ids == [1, 2]


def test_sqlite_and_postgresql_store_the_same(tmp_path: Path, postgresql: Any) -> None:
    def stored(directory: Path, url: str) -> Any:
        with serve(directory, url) as server:
            server.submit(reproducibility={"experiment_seed": 1})
            server.add_agent()
            run_id = server.begin().run_id
            server.report(run_id, training(1, 0.1), training(2, "NaN"), training(1, 1e300))
            server.exit(run_id, 1, "first")
            server.tick(2)
            server.exit(server.begin().run_id, 0)
            return [table(server, name) for name in ("points", "rollups", "runs", "trials")]

    def table(server: Server, name: str) -> list[tuple[Any, ...]]:
        columns = [column.name for column in metadata.tables[name].c if column.name != "spec"]
        return sorted(server.sql(f"SELECT {', '.join(columns)} FROM {name}"), key=str)

    assert stored(tmp_path / "a", "") == stored(tmp_path / "b", new_database(postgresql))


def health(live: LiveServer) -> Callable[[], int]:
    return lambda: httpx.get(f"{live.url}/healthz", timeout=DEADLINE_S).status_code


@pytest.mark.processes
def test_full_disk_and_lock_lose_no_reports(tmp_path: Path) -> None:
    live = LiveServer(tmp_path / "home")
    live.start()
    try:
        client = live.client()
        client.create_experiment(experiment_config(), model_archive(tmp_path / "model"))
        agent_id = client.register_agent(AgentRegistration("a", "h", [SlotInfo(0, "cpu")]))
        run_id = client.work(agent_id, 0, 0).runs[0].run_id

        def report(step: int) -> int:
            return client.report(
                run_id, msgspec.msgpack.encode(ReportBatch(step, [training(step, 1.0)]))
            )

        assert report(1) == 1
        process = live._process
        assert process is not None
        unlimited = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (4096, unlimited[1]))
        for _ in range(2):
            with pytest.raises(UnreachableError, match=r"50[37]"):
                report(2)
        assert client.trial(1)["steps_completed"] == 1
        until("its health says so", health(live), lambda status: status == 507)
        large = tmp_path / "large"
        large.mkdir()
        (large / "noise").write_bytes(random.Random(0).randbytes(20_000))
        with pytest.raises(UnreachableError, match=r"\(507\).*free some space"):
            client.create_experiment(experiment_config(), model_archive(large))
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, unlimited)
        until("its health is back", health(live), lambda status: status == 200)
        assert report(2) == 2

        locker = sqlite3.connect(live.home / "zerolab.db", isolation_level=None)
        locker.execute("BEGIN IMMEDIATE")
        waiting = threading.Thread(target=report, args=(3,))
        waiting.start()
        assert client.trial(1)["steps_completed"] == 2
        locker.execute("ROLLBACK")
        locker.close()
        waiting.join(DEADLINE_S)
        assert client.metrics(1)[0]["points"] == [[1, 1.0], [2, 1.0], [3, 1.0]]
        assert live.stop() == 0
        with closing(sqlite3.connect(live.home / "zerolab.db")) as database:
            assert database.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    finally:
        live.close()


@pytest.mark.processes
def test_health_reports_full_disk(tmp_path: Path) -> None:
    """Health is bad even while the write-ahead log still has room."""
    with mounted(tmp_path / "disk", "16m") as disk:
        (disk / "home").mkdir()
        live = LiveServer(disk / "home")
        live.log = tmp_path / "server.log"
        live.start()
        try:
            until("it is healthy", health(live), lambda status: status == 200)
            with contextlib.suppress(OSError), (disk / "filler").open("wb", buffering=0) as filler:
                while filler.write(bytes(4096)):
                    pass
            until("its health says so", health(live), lambda status: status == 507)
            assert [health(live)() for _ in range(3)] == [507] * 3
            (disk / "filler").unlink()
            until("its health is back", health(live), lambda status: status == 200)
            assert live.stop() == 0
            assert "never retrieved" not in live.log.read_text()
            assert "Traceback" not in live.log.read_text()
        finally:
            live.close()


FULL = {
    "sqlite": (
        "CREATE TRIGGER full_disk BEFORE INSERT ON trials "
        "BEGIN SELECT RAISE(ABORT, 'disk is full'); END",
        "DROP TRIGGER full_disk",
    ),
    "postgresql": (
        "ALTER TABLE trials ADD CONSTRAINT full_disk CHECK (false) NOT VALID",
        "ALTER TABLE trials DROP CONSTRAINT full_disk",
    ),
}


def test_failed_submission_leaves_no_state(server: Server) -> None:
    fill, empty = FULL["sqlite" if server.services.database.sqlite else "postgresql"]
    server.execute(fill)
    assert server.try_submit(name="first", max_restarts=0).status_code >= 500
    server.execute(empty)
    experiment = server.submit(name="second", max_restarts=2)
    server.add_agent()
    trial_id = server.trials(experiment["id"])[0]["id"]
    server.exit(server.begin(trial_id).run_id, -9, "failed")
    assert server.trial(trial_id)["restarts"] == 1
    assert server.trial(trial_id)["state"] == "QUEUED"


@pytest.mark.parametrize("first", ["delete", "submit"])
def test_submit_during_deletion_keeps_shared_code(server: Server, first: str) -> None:
    server.submit(name="old")
    server.act("kill")

    def delete() -> Any:
        return server.http.delete("/api/v1/experiments/1")

    calls = {"delete": delete, "submit": lambda: server.try_submit(name="new")}
    order = [first, *(calls.keys() - {first})]
    with ThreadPoolExecutor() as pool, server.writer_held() as waiting:
        responses = []
        for number, name in enumerate(order, start=1):
            responses.append(pool.submit(calls[name]))
            until(f"{name} waits for the writer", waiting, number.__eq__)
    assert sorted(response.result().status_code for response in responses) == [201, 204]
    assert server.http.get("/api/v1/experiments/2/archive").status_code == 200
    assert server.post("/experiments/2/fork")["experiment"]["id"] == 3


def test_code_is_deleted_with_last_experiment(server: Server) -> None:
    archives = server.services.orchestrator.home.archives
    for experiment_id in (1, 2):
        server.submit()
        server.act("kill", experiment_id)
    server.http.delete("/api/v1/experiments/1")
    assert len(list(archives.iterdir())) == 1
    server.http.delete("/api/v1/experiments/2")
    assert list(archives.iterdir()) == []
