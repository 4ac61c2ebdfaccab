"""Cluster page: the queue with reasons, and the machines."""

import re

import pytest
from playwright.sync_api import Locator, Page, expect

from tests.waiting import until
from tests.web.conftest import Watched
from tests.web.stage import TRIALS, Stage

pytestmark = [pytest.mark.browser, pytest.mark.processes]

TAKES = re.compile("ready|silent")  # this agent sends no requests, so it becomes silent
SEARCHER = {"name": "single", "metric": "loss", "max_length": 20}


def jobs(page: Page) -> Locator:
    return page.get_by_role("region", name="queue of pool later").locator("tbody tr")


def names(page: Page) -> list[str]:
    return [text or "" for text in jobs(page).locator(".name a").all_text_contents()]


def test_cluster_page_shows_and_changes_queue(stage: Stage, spectator: Watched) -> None:
    played, page = stage.played, spectator.page
    nowhere = {"slots_per_trial": 1, "resource_pool": "later"}
    experiments = [
        int(played.submit(name=name, searcher=SEARCHER, resources=nowhere)["id"])
        for name in ("first", "second")
    ]
    spectator.show("#/cluster")
    queued = jobs(page)
    expect(queued).to_have_count(2)
    expect(queued.first).to_contain_text("waiting: ")

    # The order: up, and by priority.
    order = names(page)
    assert order.index("first") < order.index("second")
    queued.filter(has_text="second").get_by_role("button", name="up").click()
    until("second goes first", lambda: names(page).index("second") < names(page).index("first"))
    field = queued.filter(has_text="first").get_by_label("priority of first")
    field.fill("7")
    field.press("Enter")
    until("first is more important", lambda: names(page)[0] == "first")
    assert {job["experiment_id"]: job["priority"] for job in played.get("/jobs")["jobs"]}[
        experiments[0]
    ] == 7
    field.fill("0")
    field.press("Tab")
    assert not field.evaluate("field => field.validity.valid")
    played.request(
        "PATCH", f"/jobs/{experiments[1]}", json={"weight": 2}
    )  # a change by another client is drawn
    weight = queued.filter(has_text="second").get_by_label("weight of second")
    expect(weight).to_have_value("2")
    expect(field).to_have_value("0")  # and keeps text that is being typed
    field.press("Escape")
    expect(field).to_have_value("7")

    # Machines: who uses the slots, and their load.
    using = int(played.submit(name="using", searcher=SEARCHER)["id"])
    load = {
        "cpu_percent": 40, "cores": 4, "memory_bytes": 2**31, "memory_total_bytes": 2**33,
        "disk_bytes": 10, "disk_total_bytes": 20,
        "slots": [
            {
                "id": slot, "cpu_percent": 150, "memory_bytes": 2**30, "gpu_percent": 75,
                "gpu_memory_bytes": 2**32, "gpu_memory_total_bytes": 2**33,
            }
            for slot in range(TRIALS)
        ],
    }  # fmt: skip
    played.post("/agents/1/work?wait_s=0", load)
    uses = page.get_by_role("list", name="slots in use on agent")
    use = uses.get_by_role("listitem").filter(has_text="using")
    expect(use.get_by_label("GPU", exact=True)).to_have_attribute("value", "75")
    expect(use).to_contain_text("150 %")
    expect(use).to_contain_text("4.0 GiB")
    trial = played.trials(using)[0]["id"]
    expect(use.get_by_role("link", name=f"trial {trial}")).to_have_attribute(
        "href", f"#/trials/{trial}"
    )
    machine_load = page.locator("tr", has=uses).get_by_label("CPU", exact=True).first
    expect(machine_load).to_have_attribute("value", "40")
    expect(page.locator("tr", has=uses)).to_contain_text("40 % of 4 cores")
    page.reload()  # the history is read once a minute
    history = use.get_by_role("img", name="in the last hour: mean 75 %, maximum 75 %")
    expect(history).to_be_visible()

    played.act("kill", using)
    played.exit(played.trials(using)[0]["run_id"], 137)
    played.request("DELETE", f"/experiments/{using}")

    # Disable a slot, then all; a new agent appears without a reload.
    played.add_agent(2, "spare-machine")
    machines = page.locator("tr", has=page.locator(".slots"))
    machine = machines.filter(has_text="spare-machine")
    expect(machine.locator(".badge")).to_have_text(TAKES)
    machine.get_by_role("button", name="slot 1").click()
    expect(machine.get_by_role("button", name="slot 1 (cpu): disabled")).to_be_visible()
    machine.get_by_role("button", name="drain").click()
    expect(machine.locator(".badge")).to_have_text("disabled")
    machine.get_by_role("button", name="enable").click()
    expect(machine.locator(".badge")).to_have_text(TAKES)
    played.add_agent(2, "spare-machine", up=0)  # as a Slurm pool whose nodes are lost
    lost = machine.get_by_role("button", name="slot 0 (cpu): no node")
    expect(lost).to_have_class("slot off")
    for experiment_id in experiments:
        played.act("kill", experiment_id)
        played.request("DELETE", f"/experiments/{experiment_id}")
    expect(queued).to_have_count(0)
