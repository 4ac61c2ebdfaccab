"""Messages about events other than the end of an experiment, each sent as often as useful."""

import pytest

from tests.server.helpers import Server, on_sqlite, training, validation
from tests.server.notifications.helpers import add, messages, sent
from tests.server.notifications.receiver import Receiver
from tests.waiting import until
from zerolab.contract.messages import AlertRecord
from zerolab.contract.notifications import EVENTS, EventName
from zerolab.contract.spec import EXIT_PREEMPTED
from zeroserver.extensions.notifications.overdue import OverdueScan
from zeroserver.extensions.notifications.service import NotificationState

pytestmark = on_sqlite

ALL: list[EventName] = list(EVENTS)
NOTIFY = {"channels": ["team"], "events": ALL, "waiting_after": 600, "stalled_after": 300}


@pytest.fixture
def team(server: Server, receiver: Receiver) -> Server:
    """A server with an agent, and a channel that gets all events."""
    add(server, receiver, events=ALL)
    server.add_agent()
    return server


def alert(title: str, text: str = "") -> AlertRecord:
    return AlertRecord(title, text, 1_800_000_000.0)


def events(server: Server) -> list[str]:
    return [row["event"] for row in messages(server)]


def log(server: Server, trial_id: int = 1) -> list[str]:
    return [line["text"] for line in server.get(f"/trials/{trial_id}/logs")["logs"]]


def test_alert_reaches_log_and_channel(team: Server, receiver: Receiver) -> None:
    secret = "token-of-the-alert"
    variables = [f"API_TOKEN={secret}"]
    team.submit(notify=NOTIFY, environment={"environment_variables": variables})
    run = team.begin()
    team.report(run.run_id, alert("Loss\nspike", f"8.1 with {secret}\x1b[0m"), alert("", ""))
    sent(team, 2)
    message = receiver.messages[0]
    assert message["title"] == "Trial 1 of experiment 1 (digits): Loss spike"
    assert message["text"].startswith("8.1 with *")
    assert message["trial"]["id"] == 1
    lines = [line for line in log(team) if line.startswith("alert: ")]
    assert lines[0].startswith("alert: Loss spike: 8.1 with *")
    assert lines[1] == "alert: Alert"
    assert secret not in str(receiver.bodies) + str(log(team))


def test_alerts_are_limited_per_hour(team: Server) -> None:
    team.submit(notify=NOTIFY)
    run = team.begin()
    team.report(run.run_id, *(alert(f"number {number}") for number in range(15)))
    assert events(team) == ["alert"] * 10
    assert len([line for line in log(team) if line.startswith("alert: ")]) == 15
    (last,) = team.sql("SELECT message FROM notifications WHERE id = 10")[0]
    assert "further ones are not sent" in last
    team.clock.now += 3601
    team.report(run.run_id, alert("later"))
    assert events(team) == ["alert"] * 11
    assert messages(team)[-1]["title"].endswith("later")


def test_nan_and_improved_metrics(team: Server) -> None:
    team.submit(notify=NOTIFY)
    run = team.begin()
    team.report(run.run_id, validation(10, 2.0), training(11, "NaN"), training(12, "NaN"))
    team.report(run.run_id, training(13, "NaN"))
    assert events(team) == ["nan"]  # once for a trial; a first result is no improvement
    team.report(run.run_id, validation(20, 3.0), validation(30, 1.5))
    assert events(team) == ["nan", "improved"]
    text = team.sql("SELECT message FROM notifications ORDER BY id")
    assert "loss is NaN at batch 11" in text[0][0]
    assert "loss 1.5 at batch 30, before 2" in text[1][0]


def test_third_restart_is_sent_once(team: Server) -> None:
    team.submit(notify=NOTIFY, max_restarts=4)
    for _ in range(4):
        run = team.begin()
        team.report(run.run_id, training(10, 2.0))
        team.exit(run.run_id, 1, "ValueError: bad")
        team.tick(3600)
    assert events(team) == ["restarts"]
    assert "restart 3 of 4" in team.sql("SELECT message FROM notifications")[0][0]


def test_each_third_preemption_is_sent(team: Server) -> None:
    team.submit(notify=NOTIFY)
    for number in range(1, 7):
        run = team.begin()
        team.exit(run.run_id, EXIT_PREEMPTED, "preempted")
        if number == 2:  # a pause does not count
            run = team.begin()
            team.act("pause")
            team.exit(run.run_id, EXIT_PREEMPTED, "preempted")
            team.act("activate")
        assert events(team) == ["preempted"] * (number // 3)
    assert "preempted 3 times" in team.sql("SELECT message FROM notifications ORDER BY id")[0][0]
    assert "preempted 6 times" in team.sql("SELECT message FROM notifications ORDER BY id")[1][0]


def test_third_preemption_is_not_sent_again(team: Server) -> None:
    """A run that is killed because it does not leave in time does not count."""
    team.submit(notify=NOTIFY)
    for _ in range(3):
        team.exit(team.begin().run_id, EXIT_PREEMPTED, "preempted")
    run = team.begin()
    team.execute("UPDATE runs SET directive = 'preempt', killed = 1 WHERE id = :id", id=run.run_id)
    team.exit(run.run_id, -9)
    assert team.trial()["state"] == "QUEUED"
    assert events(team) == ["preempted"]


def test_log_pattern_is_sent_once(team: Server) -> None:
    policies = [{"name": "slow disk", "pattern": "disk .* slow"}]
    team.submit(notify=NOTIFY, log_policies=policies)
    run = team.begin()
    team.log(run.run_id, 0, "disk sda is slow", "more")
    team.log(run.run_id, 2, "disk sdb is slow")
    assert events(team) == ["log_pattern"]
    assert "slow disk: disk sda is slow" in team.sql("SELECT message FROM notifications")[0][0]


def test_waiting_and_stalled_are_sent_once(team: Server) -> None:
    team.submit(notify=NOTIFY)
    run = team.begin()
    team.report(run.run_id, training(1, 2.0))
    team.submit(notify=NOTIFY)
    scan = OverdueScan(team.services, team.services.part(NotificationState))
    for seconds in [0, 299, 2, 200, 200, 1000]:
        team.clock.now += seconds
        team.http.portal.call(scan.scan)
        if seconds == 299:
            assert events(team) == []
    assert events(team) == ["stalled", "waiting"]
    texts = [text for (text,) in team.sql("SELECT message FROM notifications ORDER BY id")]
    assert "run 1 has reported nothing for" in texts[0]
    assert "no slots for" in texts[1]
    team.report(run.run_id, training(2, 2.0))  # a new report begins a new period
    for seconds in [0, 301]:
        team.clock.now += seconds
        team.http.portal.call(scan.scan)
    assert events(team) == ["stalled", "waiting", "stalled"]
    until("all are sent", lambda: all(row["state"] == "SENT" for row in messages(team)))
