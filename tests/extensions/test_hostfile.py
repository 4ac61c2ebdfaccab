"""Hostfiles and filters with DeepSpeed's syntax, and errors of lines."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerolab.errors import ConfigError
from zerolab.launcher.hostfile import filter_slots, parse_hostfile

HOSTS = {"worker-0": 4, "worker-1": 4}


def test_hostfile_order_of_hosts() -> None:
    text = (
        "\n# two machines\nworker-1 slots=8   # the big one\n\n  worker-0   slots=4\nme@c slots=1\n"
    )
    assert list(parse_hostfile(text).items()) == [("worker-1", 8), ("worker-0", 4), ("me@c", 1)]


def test_all_invalid_lines_are_reported() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_hostfile("a slots=2\nb\na slots=3\nc slots=x\nd slots=4x\n")
    assert [problem.split(":")[0] for problem in caught.value.problems] == [
        "line 2",
        "line 3",
        "line 4",
        "line 5",
    ]


@pytest.mark.parametrize("text", ["", "\n\n", "# nothing\n"])
def test_empty_hostfile_is_rejected(text: str) -> None:
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
    selected = filter_slots(HOSTS, include=include, exclude=exclude)
    assert list(selected.items()) == list(expected.items())


def test_counts_take_the_first_hosts_and_slots() -> None:
    assert filter_slots(HOSTS, num_nodes=1) == {"worker-0": [0, 1, 2, 3]}
    assert filter_slots(HOSTS, num_gpus=2) == {"worker-0": [0, 1], "worker-1": [0, 1]}


@pytest.mark.parametrize(
    ("filters", "message"),
    [
        ({"include": "worker-0", "exclude": "worker-1"}, "only one of them"),
        ({"include": "nohost"}, "'nohost' is not in the hostfile"),
        ({"include": "worker-0:4"}, "has slots 0 to 3, got 4"),
        ({"include": "worker-0:a"}, "must be numbers .*, got 'a'"),
        ({"include": "worker-0:0:1"}, "must be numbers"),
        ({"include": "worker-0:0-2"}, "must be numbers"),
        ({"exclude": "worker-0@worker-1"}, "no slot is left"),
        ({"include": "worker-0", "num_nodes": 0}, "cannot be combined"),
        ({"num_nodes": 3}, "must be 1 to 2"),
        ({"num_gpus": 9}, "must be 1 to 4, the slots of worker-0"),
    ],
)
def test_invalid_filter_is_rejected(filters: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        filter_slots(HOSTS, **filters)  # type: ignore[arg-type]


def test_filter_host_with_user() -> None:
    hosts = parse_hostfile("me@a slots=2\nb slots=2\n")
    assert filter_slots(hosts, include="me@a:1@b") == {"me@a": [1], "b": [0, 1]}


@given(
    st.dictionaries(st.from_regex(r"[a-z]{1,4}", fullmatch=True), st.integers(1, 8), min_size=1),
    st.data(),
)
def test_include_and_exclude_are_complementary(hosts: dict[str, int], data: st.DataObject) -> None:
    host = data.draw(st.sampled_from(sorted(hosts)))
    slots = data.draw(st.sets(st.integers(0, hosts[host] - 1), min_size=1))
    text = f"{host}:{','.join(map(str, slots))}"
    included = filter_slots(hosts, include=text)
    try:
        excluded = filter_slots(hosts, exclude=text)
    except ConfigError:
        excluded = {}
    for name, count in hosts.items():
        assert sorted(included.get(name, []) + excluded.get(name, [])) == list(range(count))


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("\ufeffworker-0 slots=4\r\nworker-1\tslots=2\r\n", {"worker-0": 4, "worker-1": 2}),
        ("worker-0 slots=4# big\n\t# none\nb slots=1 max_slots=8\n", {"worker-0": 4, "b": 1}),
        ("a\u00a0slots=1\n10.0.0.1 slots=08 # slots=2\n", {"a": 1, "10.0.0.1": 8}),
        ("[::1] slots=1\nrechner-ä slots=2", {"[::1]": 1, "rechner-ä": 2}),
        ("off slots=0\non slots=1\n", {"off": 0, "on": 1}),
    ],
)
def test_hostfile_of_other_tools(text: str, hosts: dict[str, int]) -> None:
    assert parse_hostfile(text) == hosts


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("a slots=99999999999", "slots of a: must be at most 4096, got 99999999999"),
        (f"a slots={'9' * 5000}", "must be at most 4096"),
        ("a slots=2 slots=4", "a has slots= twice"),
        ("a slots=-1", "must look like `HOST slots=N`"),
        ("a slots = 2", "must look like `HOST slots=N`"),
        ("a slots=\u0663", "must look like `HOST slots=N`"),
        ("a:4", "must look like `HOST slots=N`"),
        ("a SLOTS=4", "must look like `HOST slots=N`"),
    ],
)
def test_other_syntax_is_rejected(line: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_hostfile(f"{line}\n")
    (problem,) = refused.value.problems
    assert message in problem


OFF = {"off": 0, "me@off": 0, "worker-0": 2, "worker-1": 2}


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ({}, {"worker-0": [0, 1], "worker-1": [0, 1]}),
        ({"num_nodes": 1}, {"worker-0": [0, 1]}),
        ({"num_gpus": 1}, {"worker-0": [0], "worker-1": [0]}),
        ({"include": " worker-1 : 1 @ worker-0 "}, {"worker-0": [0, 1], "worker-1": [1]}),
        ({"exclude": "worker-0:0 , 1"}, {"worker-1": [0, 1]}),
        ({"include": "worker-0:0@worker-0:1"}, {"worker-0": [0, 1]}),
    ],
)
def test_hosts_without_slots_are_ignored(
    filters: dict[str, object], expected: dict[str, list[int]]
) -> None:
    assert filter_slots(OFF, **filters) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("filters", "message"),
    [
        ({"include": "worker-0@"}, "must name a host before and after each @"),
        ({"exclude": "@worker-0"}, "must name a host before and after each @"),
        ({"include": "worker-0@@worker-1"}, "must name a host before and after each @"),
        ({"include": "off"}, "off has no slots: the hostfile says slots=0"),
        ({"include": "me@off:0"}, "me@off has no slots"),
        ({"include": "worker-0:"}, "must be numbers with commas between them, got ''"),
        ({"include": "worker-0:0,"}, "must be numbers with commas between them, got ''"),
        ({"include": f"worker-0:{'9' * 5000}"}, "must be numbers"),
        ({"include": "worker-0:\u0661"}, "must be numbers"),
        ({"include": "worker-0,worker-1"}, "'worker-0,worker-1' is not in the hostfile"),
        ({"include": "WORKER-0"}, "'WORKER-0' is not in the hostfile"),
        ({"num_nodes": 3}, "must be 1 to 2, the hosts of the hostfile that have slots, got 3"),
    ],
)
def test_empty_filter_is_rejected(filters: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        filter_slots(OFF, **filters)  # type: ignore[arg-type]
    (problem,) = refused.value.problems
    assert message in problem


def test_hostfile_without_usable_hosts() -> None:
    with pytest.raises(ConfigError, match="every host of the hostfile has slots=0"):
        filter_slots({"a": 0})
