"""How late the arbiter is: a thread that receives something while it sleeps, naps or spins, and with 50 containers the suspend for a
request, from the moment in which the program begins to launch. And what the arbiter costs while nothing happens."""

from __future__ import annotations

import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable

from arbiter.gputime.suspend_thread import NAP_US
from arbiter.gputime.timer import Nap
from bench.gpu_time.latency import ASLEEP, KERNEL_US, LAUNCHES, LONG_US, PERIOD_US, free_lc_rate
from bench.gpu_time.node import Node, quantile, request
from bench.gpu_time.results import Results
from bench.process import cpu_s
from tests.gpu.kit.machine import Lines

REPEATS = 5
QUANTILES = (("p50", 0.5), ("p99", 0.99))
CONTAINERS = 50
GPUS = (1, 8)
"""Threads that wait in the same way at once, as the arbiter of so many GPUs has; one of them receives something."""
WORDS_PERIOD_S = 0.005
WAYS = ("sleeping", "napping", "spinning")
KEPT: tuple[tuple[str, tuple[str, ...], dict[str, str]], ...] = (
    ("", (), {}),
    (", nothing kept warm", ("unrehearsed",), {}),
    (", arbiter asleep between requests", (), ASLEEP),
)
"""How the arbiter's thread waits for a request: name, words of watched.py, settings."""
UNDER_WAY_S = 0.4
SENDER = """
import socket, sys, time
sender = socket.socket(fileno=int(sys.argv[1]))
time.sleep(0.1)
for _ in range(int(sys.argv[2])):
    time.sleep(float(sys.argv[3]))
    sender.send(repr(time.monotonic()).encode())
"""


class Waiter:
    """A thread that waits for words on a socket. `late_us`: how long each was under way."""

    def __init__(self, how: str) -> None:
        self.report, self._reported = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._epoll = select.epoll()
        self._epoll.register(self._reported.fileno(), select.EPOLLIN)
        self._nap = Nap(self._epoll.fileno(), NAP_US)
        self._wait: Callable[[], bool] = {
            "sleeping": self._sleep,
            "napping": self._nap.ends_early,
            "spinning": self._look,
        }[how]
        self.late_us: list[float] = []
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def end(self) -> None:
        self.report.send(b"end")
        self._thread.join()
        self._epoll.close()
        self.report.close()
        self._reported.close()

    def _sleep(self) -> bool:
        return bool(self._epoll.poll())

    def _look(self) -> bool:
        return bool(self._epoll.poll(0))

    def _run(self) -> None:
        while True:
            if self._wait():
                word = self._reported.recv(64)
                if word == b"end":
                    return
                self.late_us.append((time.monotonic() - float(word)) * 1e6)


def run(node: Node, results: Results, seconds: float) -> None:
    """First without any GPU, then with one."""
    _threads(results, seconds * 0.25)
    _containers(node, results, seconds * 0.75)
    results.sum_up("wakes")


def _threads(results: Results, seconds: float) -> None:
    pooled: dict[str, list[float]] = {}
    words = max(50, int(seconds / (REPEATS * len(WAYS) * len(GPUS) * WORDS_PERIOD_S)) - 60)
    for repeat in range(REPEATS):
        for gpus in GPUS:
            for how in WAYS:
                case = f"a thread {how}, {gpus} of them"
                late_us, busy = _reported(how, gpus, words)
                results.add("wakes", case, "processor", "% of a core", repeat, busy)
                _quantiles(results, case, repeat, late_us)
                pooled.setdefault(case, []).extend(late_us)
    for case, all_us in pooled.items():
        _over_all(results, case, all_us, f"{len(all_us)} of {REPEATS * words} words")


def _reported(how: str, gpus: int, words: int) -> tuple[list[float], float]:
    """How late each word was, and percent of a core that all threads took together."""
    waiters = [Waiter(how) for _ in range(gpus)]
    one = waiters[0]
    began_s, used_s = time.monotonic(), time.process_time()
    try:
        command = [sys.executable, "-c", SENDER, str(one.report.fileno()), str(words), str(WORDS_PERIOD_S)]
        subprocess.run(command, pass_fds=[one.report.fileno()], check=True)
        busy = 100 * (time.process_time() - used_s) / (time.monotonic() - began_s)
    finally:
        for waiter in waiters:
            waiter.end()
    return one.late_us, busy


def _containers(node: Node, results: Results, seconds: float) -> None:
    end = time.monotonic() + seconds
    node.start_arbiter()
    keys = ["lc", "be", *(f"idle-{number}" for number in range(CONTAINERS - 2))]
    node.grant("lc", "latency-critical")
    for key in keys[1:]:
        node.grant(key, "best-effort")
    plain = node.load()
    per_us = free_lc_rate(plain)
    plain.end()
    lc, be, *_ = node.loads(keys)
    pooled: dict[tuple[str, str], list[float]] = {}
    requests: dict[str, int] = {}
    for repeat in range(REPEATS):
        for number, (way, words, settings) in enumerate(KEPT):
            left = (REPEATS - repeat) * len(KEPT) - number
            window_s = max(1.0, ((end - time.monotonic()) / left - 4) / 2)
            node.start_arbiter(
                *words, grants_in_environment="true", **settings
            )  # nothing is mounted here, which would be looked for again and again
            node.wait_for_turns(*keys)
            case = f"{CONTAINERS} containers{way}"
            results.add("wakes", case, "processor while nothing happens", "% of a core", repeat, _idle(node, window_s))
            late_us, awake_us, busy, made = _requests(node, lc, be, per_us, window_s)
            seen = f"{made} requests, {len(late_us)} of them with a suspend"
            results.add("wakes", case, "processor beside requests", "% of a core", repeat, busy, seen)
            requests[case] = requests.get(case, 0) + made
            for since, took in (("launch", late_us), ("wake-up", awake_us)):
                _quantiles(results, f"{case}: {since} to suspend", repeat, took)
                pooled.setdefault((case, since), []).extend(took)
    for (case, since), took in pooled.items():
        _over_all(results, f"{case}: {since} to suspend", took, f"{len(took)} of {requests[case]} requests")


def _idle(node: Node, seconds: float) -> float:
    time.sleep(1.0)
    used_s = cpu_s(node.arbiter.pid)
    time.sleep(seconds)
    return 100 * (cpu_s(node.arbiter.pid) - used_s) / seconds


def _requests(
    node: Node, lc: Lines, be: Lines, per_us: int, seconds: float
) -> tuple[list[float], list[float], float, int]:
    """How late the suspend for each request began, since its launch and since the arbiter's thread woke up for it; percent of a core,
    and how many requests there were. Ends the arbiter."""
    request(be, "start", LONG_US, per_us)
    time.sleep(UNDER_WAY_S)
    began_s, used_s = time.monotonic(), cpu_s(node.arbiter.pid)
    lc.send("lc", max(20, int(seconds * 1e6 / PERIOD_US)), PERIOD_US, LAUNCHES, KERNEL_US, per_us, 0)
    at_us = lc.receive()["at_us"]
    busy = 100 * (cpu_s(node.arbiter.pid) - used_s) / (time.monotonic() - began_s)
    request(be, "stop")
    suspends = [one for one in node.stop_arbiter() if one.what == "suspend"]
    late_us, awake_us = [], []
    for at in at_us:
        after = [one for one in suspends if at <= one.began_us < at + PERIOD_US / 2]
        if after:
            late_us.append(after[0].began_us - at)
            awake_us.append(after[0].awake_us)
    return late_us, awake_us, busy, len(at_us)


def _quantiles(results: Results, case: str, repeat: int, late_us: list[float]) -> None:
    for name, part in QUANTILES:
        results.add("wakes", case, name, "us", repeat, quantile(late_us, part))


def _over_all(results: Results, case: str, late_us: list[float], of: str) -> None:
    for name, part in QUANTILES:
        results.over_all("wakes", case, name, "us", quantile(late_us, part), of)
