import select
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest

from tests.waiting import DEADLINE_S, free_port, until
from zerolab.core.socket_ranks import SocketRanks
from zerolab.errors import ConfigError, ZerolabError

T = TypeVar("T")


def on_ranks(size: int, work: Callable[[SocketRanks], T]) -> list[T]:
    """Run ``work`` on ranks in threads, each with separate sockets."""
    with socket.create_server(("127.0.0.1", 0)) as agent:  # torchrun's own store
        port = agent.getsockname()[1]

        def rank(number: int) -> T:
            ranks = SocketRanks(
                number, size, number, size, port=port, secret="s", timeout_s=DEADLINE_S
            )
            try:
                return work(ranks)
            finally:
                ranks.close()

        with ThreadPoolExecutor(size) as pool:
            return list(pool.map(rank, range(size)))


def test_single_rank_needs_no_connection() -> None:
    ranks = SocketRanks.from_environment(environment={})
    assert (ranks.rank, ranks.size, ranks.local_rank, ranks.is_chief) == (0, 1, 0, True)
    assert ranks.allgather({"a": [1, 2.5, None]}) == [{"a": [1, 2.5, None]}]
    assert ranks.broadcast("x") == "x"
    ranks.barrier()


def test_collectives_of_three_ranks() -> None:
    def work(ranks: SocketRanks) -> list[object]:
        gathered: list[object] = [ranks.allgather({"rank": ranks.rank, "x": [ranks.rank] * 2})]
        gathered.append(ranks.broadcast(f"from {ranks.rank}"))
        ranks.barrier()
        large = ranks.allgather(bytes([ranks.rank]) * 3_000_000)
        gathered.append([(part[0], len(part)) for part in large])
        for number in range(50):
            assert ranks.allgather(number * ranks.rank) == [0, number, 2 * number]
        gathered.append(ranks.is_chief)
        return gathered

    results = on_ranks(3, work)
    for rank, result in enumerate(results):
        assert result == [
            [{"rank": r, "x": [r, r]} for r in range(3)],
            "from 0",
            [(r, 3_000_000) for r in range(3)],
            rank == 0,
        ]


def test_missing_rank_is_named() -> None:
    exited = threading.Event()

    def work(ranks: SocketRanks) -> str:
        ranks.barrier()
        if ranks.rank == 2:
            assert exited.wait(DEADLINE_S)
            return ""
        if ranks.rank == 0:
            until("rank 1 has come", lambda: select.select([ranks._peers[1]], [], [], 0)[0])
            ranks.timeout_s = 1
        with pytest.raises(ZerolabError) as caught:
            ranks.allgather(1)
        if ranks.rank == 0:
            exited.set()
        return str(caught.value)

    messages = on_ranks(3, work)
    assert "allgather: rank 2 did not take part within 1 s (this is rank 0)" in messages[0]
    assert "allgather: rank 0" in messages[1]


def test_exited_rank_is_named() -> None:
    def work(ranks: SocketRanks) -> str:
        if ranks.rank == 1:
            ranks.close()
            return ""
        with pytest.raises(ZerolabError) as caught:
            ranks.barrier()
        return str(caught.value)

    assert "rank 1 has exited" in on_ranks(2, work)[0]


def test_unserializable_value_is_rejected() -> None:
    with pytest.raises(ConfigError, match="must be made of numbers"):
        SocketRanks().allgather(object())


def test_strangers_are_turned_away_and_taken_ports_are_passed_by() -> None:
    with socket.create_server(("127.0.0.1", 0)) as first:
        port = first.getsockname()[1] - 1  # the first candidate of the chief is taken
        done = threading.Event()

        def disturb() -> None:
            while not done.is_set():
                for candidate in range(port + 2, port + 6):
                    try:
                        with socket.create_connection(("127.0.0.1", candidate), 1) as stranger:
                            stranger.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
                    except OSError:
                        continue
                time.sleep(0.01)

        def rank(number: int) -> list[int]:
            ranks = SocketRanks(number, 3, number, 3, port=port, secret="s", timeout_s=DEADLINE_S)
            result = ranks.allgather(number)
            ranks.close()
            return result

        with ThreadPoolExecutor(4) as pool:
            stranger = pool.submit(disturb)
            try:
                assert list(pool.map(rank, range(3))) == [[0, 1, 2]] * 3
            finally:
                done.set()
            stranger.result()


def test_ranks_with_another_secret_do_not_meet() -> None:
    port = free_port()

    def rank(number: int) -> str:
        with pytest.raises(ZerolabError) as caught:
            SocketRanks(number, 2, number, 2, port=port, secret=str(number), timeout_s=2)
        return str(caught.value)

    with ThreadPoolExecutor(2) as pool:
        chief, other = pool.map(rank, range(2))
    assert "ranks [1] did not connect" in chief
    assert "rank 1 did not find the chief" in other


def test_incomplete_variables_are_all_named() -> None:
    with pytest.raises(ConfigError) as caught:
        SocketRanks.from_environment(environment={"WORLD_SIZE": "2", "RANK": "x"})
    assert len(caught.value.problems) == 4
    assert "torchrun" in str(caught.value)
