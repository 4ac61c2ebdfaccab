"""Interactive tasks: real programs behind the proxy of a real server, with an agent."""

import re
import shutil
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest
from playwright.sync_api import Browser, expect, sync_playwright

from tests.end_to_end.installation import Installation, in_process
from tests.extensions.launcher_ssh.sshd import SSHD
from tests.launcher.helpers import wait_for_exit
from tests.waiting import DEADLINE_S, free_port, until
from tests.web.conftest import BROWSER_ARGUMENTS

pytestmark = pytest.mark.processes

ECHO = Path(__file__).with_name("echo_app.py")
METRICS = """
import zerolab.core

with zerolab.core.init() as context:
    for step in range(1, 4):
        context.train.report_training_metrics(step, {"loss": 1 / step})
    context.train.report_validation_metrics(3, {"loss": 0.25})
"""


@dataclass
class Team:
    """An installation with users."""

    installation: Installation
    tokens: dict[str, str]

    @property
    def url(self) -> str:
        return self.installation.client.url

    def zerolab(self, user: str, *arguments: str | Path) -> str:
        """Run the command line as a user; return its output."""
        environment = self.installation.environment()
        environment |= {"ZEROLAB_MASTER": self.url, "ZEROLAB_TOKEN": self.tokens[user]}
        return in_process(environment, *arguments).stdout.strip()

    def get(self, user: str, path: str, **headers: str) -> httpx.Response:
        """Send a request with the token of a user; none for an empty name."""
        if user:
            headers["Authorization"] = f"Bearer {self.tokens[user]}"
        return httpx.get(self.url + path, headers=headers, timeout=DEADLINE_S)

    def wait_for_page(self, user: str, task: int, path: str = "") -> httpx.Response:
        """Wait until a page of a task responds."""
        return until(
            f"task {task} responds",
            lambda: self.get(user, f"/proxy/{task}/{path}"),
            lambda response: response.status_code == 200,
            details=lambda: "\n".join(self.installation.lines(task)[-20:]),
        )

    def stop(self, task: int) -> None:
        self.installation.client.experiment_action(task, "kill")


@pytest.fixture(scope="module")
def team(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Team]:
    with Installation.running(tmp_path_factory.mktemp("team") / "home", slots=3) as installation:
        client = installation.client
        tokens = {"admin": installation.home.ensure_token()}
        for name, role in (("ann", "member"), ("bob", "member"), ("vic", "viewer")):
            client.create_user(name, role)
            tokens[name] = str(client.create_token(user=name)["secret"])
        yield Team(installation, tokens)


@pytest.fixture(scope="module")
def port_task(team: Team, tmp_path_factory: pytest.TempPathFactory) -> int:
    """Task of ann with a port."""
    folder = tmp_path_factory.mktemp("context")
    (folder / "app.py").write_text(ECHO.read_text())
    port = str(free_port())
    command = ["task", "run", "--name", "echo", "--port", port, "--context", folder]
    command += ["--idle-timeout", "1h"]
    task = int(team.zerolab("ann", *command, "--", "python", "app.py", port))
    team.wait_for_page("ann", task)
    return task


@dataclass
class TaskHost:
    """Browser session at the host name of a task."""

    url: str
    host: str
    cookie: str

    def send(self, method: str, path: str, **headers: str) -> httpx.Response:
        fields = {"Host": self.host, "Cookie": self.cookie, **headers}
        content = (b"x" * 100_000 for _ in range(20)) if method == "POST" else None
        return httpx.request(
            method, self.url + path, headers=fields, content=content, timeout=DEADLINE_S
        )


def open_host(team: Team, user: str, task: int) -> TaskHost:
    """Open a task as a browser does with a link."""
    link = httpx.URL(team.zerolab(user, "task", "open", "--no-browser", str(task)))
    host = f"{link.host}:{link.port}"
    response = httpx.get(f"{team.url}{link.raw_path.decode()}", headers={"Host": host})
    assert response.status_code == 303, response.text
    again = httpx.get(f"{team.url}{link.raw_path.decode()}", headers={"Host": host})
    assert again.status_code == 403  # a link is valid once
    return TaskHost(team.url, host, response.headers["Set-Cookie"].partition(";")[0])


def test_only_owner_and_administrators_reach_a_port(team: Team, port_task: int) -> None:
    path = f"/proxy/{port_task}/some%2Fpath?a=b"
    for user in ("ann", "admin"):
        assert team.get(user, path).json()["path"] == "/some%2Fpath?a=b"
    for user in ("bob", "vic"):
        assert team.get(user, path).status_code == 403
        link = httpx.post(
            f"{team.url}/api/v1/interactive-tasks/{port_task}/link",
            headers={"Authorization": f"Bearer {team.tokens[user]}"},
        )
        assert link.status_code == 403
        assert team.get(user, "/api/v1/interactive-tasks").json() == {"tasks": []}
    assert team.get("ann", f"/proxy%2F{port_task}%2Fsome").status_code == 422
    assert team.get("", path).status_code == 401
    page = team.get("", path, Accept="text/html")
    assert (page.status_code, page.headers["Location"]) == (303, f"/#/experiments/{port_task}")
    assert team.get("ann", "/proxy/99999/").status_code == 404
    tasks = team.get("ann", "/api/v1/interactive-tasks").json()["tasks"]
    (listed,) = (task for task in tasks if task["experiment_id"] == port_task)
    assert (listed["kind"], listed["ready"]) == ("port", True)
    shown = team.zerolab("ann", "task", "describe", str(port_task))
    assert f"{team.url}/proxy/{port_task}/" in shown
    assert re.search(r"ends in    (59 min|1 h|60 min)", shown)  # it was used just now


def test_programs_receive_no_credentials(team: Team, port_task: int) -> None:
    response = team.get("ann", f"/proxy/{port_task}/", Cookie="a=1", Connection="X-Hop", X_Hop="1")
    received = {name.lower(): value for name, value in response.json()["headers"].items()}
    assert received.keys().isdisjoint({"authorization", "cookie"})
    assert "Set-Cookie" not in response.headers
    assert "sandbox" in response.headers["Content-Security-Policy"]

    host = open_host(team, "ann", port_task)
    ours = host.cookie.partition("=")[0]
    response = host.send("GET", "/", Cookie=f"app=2; {host.cookie}; other=3", X_Set=ours)
    received = {name.lower(): value for name, value in response.json()["headers"].items()}
    assert received["cookie"] == "app=2; other=3"
    assert received["host"] == host.host
    assert response.headers.get_list("Set-Cookie") == ["app=1; Path=/"]
    assert response.headers["Content-Security-Policy"] == "frame-ancestors 'self'"


def test_pages_of_a_task_cannot_use_the_server(team: Team, port_task: int) -> None:
    """The session of the server is worth nothing at a task's host, and vice versa."""
    main = httpx.get(team.url + httpx.URL(team.installation.client.login_link()).raw_path.decode())
    session = main.headers["Set-Cookie"].partition(";")[0]
    host = open_host(team, "ann", port_task)
    assert host.send("GET", "/", Cookie=session).status_code == 401
    assert team.get("", "/api/v1/info", Cookie=session).status_code == 200
    assert team.get("", "/api/v1/info", Cookie=host.cookie).status_code == 401
    name = session.partition("=")[0]
    forged = f"{name}={host.cookie.partition('=')[2]}"
    assert team.get("", "/api/v1/info", Cookie=forged).status_code == 401
    other = TaskHost(host.url, host.host.replace(f"-{port_task}.", f"-{port_task + 1}."), "")
    assert other.send("GET", "/", Cookie=host.cookie).status_code == 401
    assert "/api/v1/info" in host.send("GET", "/api/v1/info").json()["path"]  # the program's path

    opened = team.get("", f"/proxy/{port_task}/", Cookie=session, Accept="text/html")
    assert opened.status_code == 303
    assert opened.headers["Location"].startswith(f"http://{host.host}/.zerolab/enter?code=")


def test_other_origins_cannot_send_requests(team: Team, port_task: int) -> None:
    host = open_host(team, "ann", port_task)
    origin = f"http://{host.host}"
    chunked = host.send("POST", "/upload", Origin=origin)
    assert chunked.json()["size"] == 2_000_000
    upgrade = {"Connection": "Upgrade", "Upgrade": "websocket"}
    for wrong in ("http://evil.example", "", team.url):
        assert host.send("POST", "/upload", Origin=wrong).status_code == 403
        assert host.send("GET", "/", Origin=wrong, **upgrade).status_code == 403
    team.zerolab("ann", "logout")
    assert host.send("GET", "/").status_code == 401


def test_open_connection_ends_with_its_token(team: Team, port_task: int) -> None:
    """A connection, such as that of a shell, does not outlive the token that opened it."""
    token = team.installation.client.create_token(user="ann")
    url = httpx.URL(team.url)
    with socket.create_connection((url.host, url.port or 80), DEADLINE_S) as connection:
        for head in (
            f"GET /proxy/{port_task}/ HTTP/1.1\r\nHost: {url.host}\r\nConnection: Upgrade\r\n"
            f"Upgrade: tcp\r\nAuthorization: Bearer {token['secret']}\r\n\r\n",
            "GET / HTTP/1.1\r\nHost: task\r\n\r\n",
        ):
            connection.sendall(head.encode())
            assert connection.recv(100)
        address = f"{team.url}/api/v1/users/ann/tokens/{token['token']['id']}"
        headers = {"Authorization": f"Bearer {team.tokens['admin']}"}
        assert httpx.delete(address, headers=headers, timeout=DEADLINE_S).status_code == 204
        while connection.recv(65536):  # the remainder of the response
            pass


def test_responses_are_streamed(team: Team, port_task: int) -> None:
    headers = {"Authorization": f"Bearer {team.tokens['ann']}"}
    url = f"{team.url}/proxy/{port_task}/stream"
    with httpx.stream("GET", url, headers=headers, timeout=DEADLINE_S) as response:
        parts = response.iter_raw()
        assert next(parts) == b"first"
        team.get("ann", f"/proxy/{port_task}/release")
        assert b"".join(parts) == b"second"


def test_tasks_reconnect_to_a_restarted_server(team: Team, port_task: int) -> None:
    team.installation.kill_server()
    team.installation.up()
    assert team.wait_for_page("ann", port_task).json()["path"] == "/"


def test_idle_task_ends_with_its_reason(team: Team, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    options = ["--port", str(free_port()), "--idle-timeout", "1s", "--context", tmp_path]
    command = ["python", "-m", "http.server", "--bind", "127.0.0.1", options[1]]
    task = int(team.zerolab("ann", "task", "run", "--name", "idle", *options, "--", *command))
    ended = team.installation.wait_for(task)
    assert (ended["state"], ended["error"]) == ("COMPLETED", "idle: not used for 1 s")
    gone = team.get("ann", f"/proxy/{task}/")
    assert gone.status_code == 409
    assert f"task {task} has ended" in gone.text


@pytest.mark.machines
@pytest.mark.skipif(SSHD is None, reason="sshd is not installed (openssh-server)")
def test_ssh_connects_through_the_server(team: Team, tmp_path: Path) -> None:
    task = int(team.zerolab("ann", "shell", "start"))
    config = tmp_path / "config"
    config.write_text(team.zerolab("ann", "shell", "config", str(task)))
    environment = team.installation.environment() | {"ZEROLAB_TOKEN": team.tokens["ann"]}

    def ssh(**variables: str) -> subprocess.CompletedProcess[str]:
        words = [
            "ssh",
            "-F",
            str(config),
            f"zerolab-{task}",
            "wc -c; echo $OMP_NUM_THREADS; exit 3",
        ]
        return subprocess.run(
            words, input="x" * 1_000_000, env=environment | variables, check=False,
            capture_output=True, text=True, timeout=DEADLINE_S,
        )  # fmt: skip

    done = ssh()
    assert done.returncode == 3, done.stderr
    size, threads = done.stdout.split()
    assert size == "1000000"
    assert int(threads) >= 1
    refused = ssh(ZEROLAB_TOKEN=team.tokens["bob"])
    assert refused.returncode == 255
    assert f"experiment {task} belongs to ann" in refused.stderr
    assert team.tokens["ann"] not in config.read_text()
    words = [
        "ssh",
        "-F",
        str(config),
        f"zerolab-{task}",
        "nohup sleep 1000 > /dev/null 2>&1 & echo $!",
    ]
    left = int(subprocess.check_output(words, env=environment, timeout=DEADLINE_S))
    assert psutil.pid_exists(left)
    team.installation.client.experiment_action(task, "cancel")
    team.installation.wait_for(task)
    wait_for_exit(left)  # it would use the GPU of the next run


def test_tensorboard_shows_exported_metrics(team: Team, tmp_path: Path) -> None:
    experiment = team.installation.submit(
        tmp_path,
        {
            "name": "metrics",
            "entrypoint": "python script.py",
            "searcher": {"name": "single", "metric": "loss", "max_length": {"batches": 3}},
        },
        {"script.py": METRICS},
    )
    team.installation.wait_for(experiment)
    link = team.zerolab("ann", "tensorboard", str(experiment))
    task = int(link.rstrip("/").rpartition("/")[2])
    assert link == f"{team.url}/proxy/{task}/"
    team.wait_for_page("ann", task)
    (run, tags), *_ = until(
        "TensorBoard has read the files",
        lambda: team.get("ann", f"/proxy/{task}/data/plugin/scalars/tags").json(),
    ).items()
    assert run.startswith(f"experiment-{experiment}/trial-")
    assert tags.keys() >= {"training/loss", "validation/loss"}
    query = httpx.QueryParams({"run": run, "tag": "training/loss"})
    points = team.get("ann", f"/proxy/{task}/data/plugin/scalars/scalars?{query}").json()
    assert [(step, round(value, 3)) for _, step, value in points] == [
        (1, 1.0),
        (2, 0.5),
        (3, 0.333),
    ]
    team.stop(task)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        path = shutil.which("chromium") or shutil.which("chromium-browser")
        browser = playwright.chromium.launch(executable_path=path, args=BROWSER_ARGUMENTS)
        yield browser
        browser.close()


@pytest.mark.browser
def test_notebook_runs_a_cell_in_a_browser(team: Team, browser: Browser, tmp_path: Path) -> None:
    """Open JupyterLab from the page of the server; the output of a cell comes by WebSocket."""
    pytest.importorskip("jupyterlab")
    options = ["--directory", tmp_path, "--idle-timeout", "10m"]
    link = team.zerolab("admin", "notebook", "start", *options)
    page = browser.new_page()
    page.set_default_timeout(DEADLINE_S * 1000)
    page.goto(team.installation.client.login_link())
    page.goto(link)  # reloads until JupyterLab has started
    page.locator(".jp-LauncherCard[data-category=Notebook]").first.click()
    page.locator(".jp-Notebook .cm-content").click()
    page.keyboard.type("print('forty', 6 * 7)")
    page.keyboard.press("Shift+Enter")
    output = page.locator(".jp-OutputArea-output")
    expect(output).to_have_text("forty 42", timeout=DEADLINE_S * 1000)
    cookies = {cookie["name"] for cookie in page.context.cookies(page.url)}
    stolen = page.evaluate("document.cookie")
    assert not any(name in stolen for name in cookies if name.startswith("zerolab"))
    refused = page.evaluate(
        "url => fetch(url, {credentials: 'include'}).then(r => r.text(), error => 'refused')",
        f"{team.url}/api/v1/experiments",
    )
    assert refused == "refused"
    page.close()
    assert list(tmp_path.glob("*.ipynb"))
    team.stop(int(link.rstrip("/").rpartition("/")[2]))
