"""Processes of a run wait for each other a bounded time, and all say which one is missing."""

import concurrent.futures
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time

import pytest

from experiments.command.address import Address
from experiments.command.meeting import meet
from experiments.errors import AbsentError, InputError
from tests.shared import children

LOST = AbsentError, InputError


@pytest.fixture
def at():
    return f"localhost:{children.free_port()}"


def joining(place):
    """Joins as one process: its error, or None. Process 0 then listens, as JAX does."""
    try:
        meet(place)
    except LOST as error:
        return error
    if place.number == 0:
        port = int(place.coordinator.rpartition(":")[2])
        with socket.create_server(("", port)) as jax:
            for _ in range(1, place.count):
                jax.accept()[0].close()
    return None


def together(*places, delay=0.0):
    """What `joining` returns in each process. They start one after another."""
    with concurrent.futures.ThreadPoolExecutor(len(places)) as pool:
        started = []
        for place in places:
            started.append(pool.submit(joining, place))
            time.sleep(delay)
        return [one.result() for one in started]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_processes_that_all_start_go_on(at, order):
    places = [Address(at, 3, number, wait=20) for number in order]
    began = time.monotonic()
    assert together(*places, delay=0.05) == [None] * 3
    assert time.monotonic() - began < 3, "JAX listens at once, and so the others go on at once"


def test_one_process_waits_for_no_other(at):
    meet(Address(at, 1, 0, wait=60))


@pytest.mark.parametrize("started", [(0,), (0, 2), (0, 1, 3)])
def test_all_that_started_say_which_is_missing(at, started):
    count = max(started) + 2
    absent = sorted({*range(count)} - {*started})
    found = together(*(Address(at, count, number, wait=0.3) for number in started))
    assert {type(error) for error in found} == {AbsentError}
    named = f"process{'es' * (len(absent) > 1)} {', '.join(map(str, absent))}"
    for error in found:
        assert str(error).startswith(f"{named} of {count} did not reach process 0 at {at} in 0.3 s")
        assert "by --wait SECONDS" in str(error)


def test_many_missing_processes_are_counted(at):
    (error,) = together(Address(at, 64, 0, wait=0.1))
    assert str(error).startswith("processes 1, 2, 3, 4, 5, 6, 7, 8 and 55 more of 64 did not reach")


def test_without_process_0_the_others_say_so(at):
    found = together(*(Address(at, 3, number, wait=0.3) for number in (1, 2)))
    assert {type(error) for error in found} == {AbsentError}
    for number, error in zip((1, 2), found):
        assert str(error).startswith(f"process 0 did not answer process {number} of 3 at {at}")
        assert "Connection refused" in str(error)


def test_a_host_that_has_no_name_yet_is_tried_again():
    at = "no-such-host.invalid:5"
    (error,) = together(Address(at, 2, 1, wait=0.3))
    assert isinstance(error, AbsentError)
    assert f"at {at} in 0.3 s" in str(error)


def test_a_process_that_leaves_is_missing_until_it_comes_again(at):
    """Strangers, such as scanners of ports, are not counted."""
    host, _, port = at.partition(":")

    def passing(said):
        with contextlib.closing(socket.create_connection((host, int(port)))) as line:
            line.sendall(said)

    places = [Address(at, 2, number, wait=0.6) for number in (0, 1)]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        first = pool.submit(joining, places[0])
        time.sleep(0.1)
        for said in (b"GET / HTTP/1.0\r\n\r\n", b"", b"jaxmem: process 1 of 3"):
            passing(said)
        assert not first.done()
        assert joining(places[1]) is None
        assert first.result() is None


def test_a_process_that_ends_before_the_others_came_is_missing(at):
    host, _, port = at.partition(":")
    with concurrent.futures.ThreadPoolExecutor() as pool:
        first = pool.submit(joining, Address(at, 3, 0, wait=0.4))
        time.sleep(0.1)
        with socket.create_connection((host, int(port))) as line:
            line.sendall(b"jaxmem: process 1 of 3\n")
            time.sleep(0.1)  # until process 0 has read it
        second = pool.submit(joining, Address(at, 3, 2, wait=0.4))
        for one in (first, second):
            assert str(one.result()).startswith("process 1 of 3 did not reach process 0")


@pytest.mark.parametrize(
    ("count", "number", "message"),
    [
        (3, 1, "--processes: got 3 of process 1, and 4 of process 0; allowed: one number"),
        (4, 2, "--process: got 2 of two processes; allowed: a number of its own for each"),
    ],
)
def test_places_that_do_not_agree_end_all(at, count, number, message):
    """Process 2 of 4 has come before."""
    places = Address(at, 4, 0, wait=20), Address(at, 4, 2, wait=20), Address(at, count, number)
    found = together(*places, delay=0.1)
    assert {type(error) for error in found} == {InputError}
    assert all(str(error).startswith(message) for error in found)


def test_a_port_in_use_is_named(at):
    port = int(at.rpartition(":")[2])
    with socket.create_server(("", port)):
        (error,) = together(Address(at, 2, 0, wait=20))
    assert isinstance(error, InputError)
    assert re.search(
        f"cannot use port {port} of its host: .* in use.*; allowed: a free port", str(error)
    )


def test_another_program_at_the_address_is_not_process_0(at):
    port = int(at.rpartition(":")[2])

    def answered(server):
        with contextlib.suppress(OSError):
            while True:
                with server.accept()[0] as line:
                    line.sendall(b"HTTP/1.0 400 Bad Request\n")

    with (
        socket.create_server(("", port)) as server,
        concurrent.futures.ThreadPoolExecutor() as pool,
    ):
        pool.submit(answered, server)
        (error,) = together(Address(at, 2, 1, wait=0.3))
        server.shutdown(socket.SHUT_RDWR)
    assert isinstance(error, AbsentError)
    assert "in 0.3 s (another program answered)" in str(error)


@pytest.mark.slow
@pytest.mark.parametrize("started", [(0,), (1, 2), (0, 2)])
def test_a_run_without_one_of_its_processes_ends_in_time(at, started, tmp_path):
    """Real processes: each ends with exit code 1 and one line, without a stack trace."""
    absent = "process 0" if 0 not in started else "process 1" if 2 in started else "processes 1, 2"
    line = [sys.executable, "-m", "experiments.train", "gpt_nano", "mesh.data=-1"]
    place = ["--coordinator", at, "--processes", "3", "--wait", "8", "--out", tmp_path / "out"]
    began = time.monotonic()
    running = [
        subprocess.Popen(
            [*line, *place, "--process", str(number)],
            env=children.with_cpus(1),
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in started
    ]
    try:
        said = [one.communicate(timeout=60)[1] for one in running]
    finally:
        for one in running:
            one.kill()
    assert time.monotonic() - began < 60
    assert [one.returncode for one in running] == [1] * len(started)
    for text in said:
        (error,) = [row for row in text.splitlines() if row.startswith("error:")]
        assert error.startswith(f"error: {absent} ")
        assert at in error
        assert "--wait SECONDS" in error
        assert "Traceback" not in text
        assert "stack trace" not in text
    assert os.listdir(tmp_path) == []


@pytest.mark.slow
def test_a_process_that_is_lost_while_jax_connects_ends_the_others_with_a_message(at, tmp_path):
    """All have started, and one is killed before JAX has connected it."""
    program = """
import os, signal, sys
import jax
from experiments import train
from experiments.command import processes
if "1" == sys.argv[-1]:
    jax.distributed.initialize = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
processes.CONNECTED = 3.0
sys.exit(train.main(sys.argv[1:]))
"""
    line = [sys.executable, "-c", program, "gpt_nano", "mesh.data=-1", "--out", tmp_path / "out"]
    running = [
        subprocess.Popen(
            [*line, "--coordinator", at, "--processes", "2", "--process", str(number)],
            env=children.with_cpus(1),
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(2)
    ]
    try:
        said = [one.communicate(timeout=60)[1] for one in running]
    finally:
        for one in running:
            one.kill()
    assert [one.returncode for one in running] == [1, -signal.SIGKILL]
    assert f"error: process 0 of 2: JAX has not connected the processes at {at} in 3 s" in said[0]
    assert "stack trace" not in said[0]
