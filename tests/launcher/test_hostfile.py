"""Hostfiles and their filters keep DeepSpeed's syntax, and say what is wrong with a line."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerolab.errors import ConfigError
from zerolab.launcher.hostfile import filter_slots, parse_hostfile

HOSTS = {"worker-0": 4, "worker-1": 4}


def test_a_hostfile_gives_hosts_and_slots_in_its_order() -> None:
    text = (
        "\n# two machines\nworker-1 slots=8   # the big one\n\n  worker-0   slots=4\nme@c slots=1\n"
    )
    assert list(parse_hostfile(text).items()) == [("worker-1", 8), ("worker-0", 4), ("me@c", 1)]


def test_every_bad_line_of_a_hostfile_is_named_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_hostfile("a slots=2\nb\na slots=3\nc slots=x\nd slots=4x\n")
    assert [problem.split(":")[0] for problem in caught.value.problems] == [
        "line 2",
        "line 3",
        "line 4",
        "line 5",
    ]


@pytest.mark.parametrize("text", ["", "\n\n", "# nothing\n"])
def test_an_empty_hostfile_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="at least one host"):
        parse_hostfile(text)


@pytest.mark.parametrize(
    ("include", "exclude", "expected"),
    [
        ("", "", {"worker-0": [0, 1, 2, 3], "worker-1": [0, 1, 2, 3]}),
        ("worker-0", "", {"worker-0": [0, 1, 2, 3]}),
        ("worker-1:2,0,2", "", {"worker-1": [0, 2]}),
        ("worker-1:0@worker-0", "", {"worker-0": [0, 1, 2, 3], "worker-1": [0]}),
        ("worker-0@worker-0:1", "", {"worker-0": [1]}),
        ("", "worker-0", {"worker-1": [0, 1, 2, 3]}),
        ("", "worker-0:0,1,2,3@worker-1:3", {"worker-1": [0, 1, 2]}),
    ],
)
def test_filters_choose_hosts_and_slots(
    include: str, exclude: str, expected: dict[str, list[int]]
) -> None:
    found = filter_slots(HOSTS, include=include, exclude=exclude)
    assert list(found.items()) == list(expected.items())


def test_counts_take_the_first_hosts_and_slots() -> None:
    assert filter_slots(HOSTS, num_nodes=1) == {"worker-0": [0, 1, 2, 3]}
    assert filter_slots(HOSTS, num_gpus=2) == {"worker-0": [0, 1], "worker-1": [0, 1]}


@pytest.mark.parametrize(
    ("filters", "message"),
    [
        ({"include": "worker-0", "exclude": "worker-1"}, "only one of them"),
        ({"include": "nohost"}, "'nohost' is not in the hostfile"),
        ({"include": "worker-0:4"}, "has slots 0 to 3, got 4"),
        ({"include": "worker-0:a"}, "must be numbers, got 'a'"),
        ({"include": "worker-0:0:1"}, "must be numbers"),
        ({"include": "worker-0:0-2"}, "must be numbers"),
        ({"exclude": "worker-0@worker-1"}, "no slot is left"),
        ({"include": "worker-0", "num_nodes": 0}, "cannot be combined"),
        ({"num_nodes": 3}, "must be 1 to 2"),
        ({"num_gpus": 9}, "must be 1 to 4, the slots of worker-0"),
    ],
)
def test_a_filter_that_cannot_be_is_refused_with_the_reason(
    filters: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        filter_slots(HOSTS, **filters)  # type: ignore[arg-type]


def test_a_host_with_a_user_can_be_filtered() -> None:
    hosts = parse_hostfile("me@a slots=2\nb slots=2\n")
    assert filter_slots(hosts, include="me@a:1@b") == {"me@a": [1], "b": [0, 1]}


@given(
    st.dictionaries(st.from_regex(r"[a-z]{1,4}", fullmatch=True), st.integers(1, 8), min_size=1),
    st.data(),
)
def test_include_and_exclude_part_the_slots_between_them(
    hosts: dict[str, int], data: st.DataObject
) -> None:
    host = data.draw(st.sampled_from(sorted(hosts)))
    slots = data.draw(st.sets(st.integers(0, hosts[host] - 1), min_size=1))
    text = f"{host}:{','.join(map(str, slots))}"
    kept = filter_slots(hosts, include=text)
    try:
        rest = filter_slots(hosts, exclude=text)
    except ConfigError:
        rest = {}
    for name, count in hosts.items():
        assert sorted(kept.get(name, []) + rest.get(name, [])) == list(range(count))
