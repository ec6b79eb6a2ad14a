"""Two processes with CPU devices, which run one experiment: on this machine's network, or each in a
network of its own.
"""

import contextlib
import dataclasses
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Iterator

from tests.shared import children

SECONDS = 240
# A GPT whose steps take milliseconds. It saves after each step.
MICRO = (
    "model.layers=2", "model.width=16", "model.heads=2", "train.sequence=16", "train.loss_chunk=8",
    "train.steps=10", "optimizer.warmup=2", "plan.budget=none", "sample.length=3",
    "train.save_every=0", "train.eval_batches=1", "train.log_every=1",
)  # fmt: skip
MESH = ("mesh.fsdp=2", "mesh.tensor=2")
PROGRAM = "tests.programs.meshed_together"


@dataclasses.dataclass(frozen=True)
class Run:
    """A command of `experiments`, a config, and the settings of a small run."""

    trainer: str
    config: str
    settings: tuple[str, ...]


GPT = Run("train", "gpt_nano", MICRO)
HOSTS = "10.77.0.1", "10.77.0.2"
NOBODY = "02:00:00:00:00:99"  # an address of no link


class Network:
    """Two network namespaces that a link joins. Each process of a pair runs in a namespace of its
    own, under a host name that is the address of its end of the link.
    """

    def __init__(self):
        self.names = tuple(f"jaxmem-{os.getpid()}-{number}" for number in range(2))
        self.link = "wire"

    def __enter__(self):
        try:
            for name in self.names:
                _ip("netns", "add", name)
            first, second = self.names
            ends = ("netns", first, "type", "veth", "peer", "name", self.link, "netns", second)
            _ip("link", "add", self.link, *ends)
            for name, host in zip(self.names, HOSTS):
                _ip("-n", name, "address", "add", f"{host}/24", "dev", self.link)
                _ip("-n", name, "link", "set", self.link, "up")
                _ip("-n", name, "link", "set", "lo", "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        for name in self.names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)

    def within(self, number: int) -> list[str]:
        """The words before a command that runs as process `number`."""
        enter = ["ip", "netns", "exec", self.names[number], "unshare", "--uts", "sh", "-c"]
        return [*enter, 'hostname "$0" && exec "$@"', HOSTS[number]]

    def cut(self, ends: tuple[int, ...], silently: bool) -> None:
        """Takes the link down at one end; or silently, with the links up, drops each packet that
        one of the ends sends.
        """
        for end in ends:
            name, host = self.names[end], HOSTS[1 - end]
            if silently:
                to = ("lladdr", NOBODY, "nud", "permanent", "dev", self.link)
                _ip("-n", name, "neighbour", "replace", host, *to)
            else:
                _ip("-n", name, "link", "set", self.link, "down")

    def mend(self) -> None:
        for name in self.names:
            _ip("-n", name, "neighbour", "flush", "dev", self.link, "nud", "permanent")
            _ip("-n", name, "link", "set", self.link, "up")


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


def networks() -> bool:
    """Whether this machine allows network namespaces."""
    try:
        with Network():
            return True
    except (OSError, subprocess.CalledProcessError):
        return False


class Pair:
    """Two processes of a run with the given settings, which writes to `out`.

    run: by default, of gpt_nano. program: the module that each process runs. environment: its
      environment; default: with two CPU devices. `own`: more of its variables.
    """

    def __init__(
        self,
        out: pathlib.Path,
        *settings: str,
        run: Run = GPT,
        program: str = PROGRAM,
        network: Network | None = None,
        environment: dict[str, str] | None = None,
        **own: str,
    ):
        self.logs, self.running = [], []
        given = (environment or children.with_cpus(2)) | trains(run) | own
        host, port = ("localhost" if network is None else HOSTS[0]), children.free_port()
        for number in range(2):
            self.logs.append(out.with_name(f"{out.name}-{number}.log"))
            line = [number, 2, f"{host}:{port}", out, *run.settings, *settings]
            before = [] if network is None else network.within(number)
            with self.logs[-1].open("wb") as log:
                self.running.append(
                    subprocess.Popen(
                        [*before, sys.executable, "-m", program, *map(str, line)],
                        env=given,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                    )
                )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for one in self.running:
            one.kill()
            one.wait()

    def said(self, number: int) -> str:
        return self.logs[number].read_text("utf-8", errors="replace")

    def reaches(self, step: int, seconds: float = SECONDS) -> None:
        """Waits for the line of a step."""
        end = time.monotonic() + seconds
        while f"step {step}/" not in self.said(0):
            assert time.monotonic() < end, self.said(0)[-3000:]
            time.sleep(0.02)

    def codes(self, seconds: float = SECONDS) -> list[int | None]:
        """The exit codes of the processes; None of a process that does not end in the time."""
        end = time.monotonic() + seconds
        for one in self.running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                one.wait(max(0.0, end - time.monotonic()))
        return [one.poll() for one in self.running]

    def ends(self, seconds: float) -> Iterator[tuple[int, float]]:
        """The number of each process that ends in the time, and when it ended."""
        left, end = {0, 1}, time.monotonic() + seconds
        while left and time.monotonic() < end:
            for number in [n for n in left if self.running[n].poll() is not None]:
                left.remove(number)
                yield number, time.monotonic()
            time.sleep(0.02)


def one_place() -> list[str]:
    """The options of a process that is alone in its run, and adds as several do: by gloo."""
    place = f"localhost:{children.free_port()}", "--processes", "1", "--process", "0"
    return ["--coordinator", *place]


def trains(run: Run) -> dict[str, str]:
    """The variable by which the program of a pair trains a run."""
    return {"TRAINS": f"{run.trainer} {run.config}"}


def alone(out: pathlib.Path, devices: int, *settings: str, run: Run = GPT) -> None:
    """Trains the run of a pair in one process."""
    line = [0, 1, "", out, *run.settings, *settings]
    environment = children.with_cpus(devices) | trains(run)
    children.python("-m", PROGRAM, *line, environment=environment)
