"""Faults: runs that are stopped at random moments, checkpoints that were changed, and files with a
mistake.

    python -m benchmarks.faults [RESULT ...]

`kills`: a training is stopped by SIGKILL, SIGTERM and SIGINT, and started again by the same command
until it ends: what is lost, and does it end as a training that was not stopped? A small GPT under a
plan, which saves after every step, so that each start imports, plans, compiles, reads a checkpoint,
trains, saves and evaluates. Before a signal the process's finished checkpoints are listed; after
it, the newest whole checkpoint must be as new. Rows and losses of a run that has ended are compared
with the rows and losses of a run without signals. Two runs train at the same time.

`checkpoint_faults`: what `jaxmem.runs` does with faults in stored checkpoints, against orbax alone.
Three checkpoints of a small state are kept, as a run keeps them. A fault is made in one file of the
newest: a bit turned, cut off, emptied, deleted, or replaced by the file of an older checkpoint; the
manifest's file too. Then the newest state is requested, and all its arrays are compared. orbax
alone reads the same files but the manifest, so that faults in manifests are not counted for it.

`bad_files`: are configs and plans' files with a mistake refused? Each file has one mistake, and is
made from a correct one: from all shipped configs, from a plan of the library for a small GPT, and
from a plan without an empty field (`tests/shared/bad_configs.py` and `bad_plans.py`). A config
is given to its command; a plan's file to the commands that read one, in turns, and to a training as
`plan.path`. It is refused if the command ends with exit code 2 and a message that names the file
and the key, without a traceback, before anything is compiled or written.
"""

import collections
import concurrent.futures
import contextlib
import itertools
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.shared.results import Benchmark, Report, measure
from experiments.command.load import FOLDER, load
from experiments.running.planning import new_plan
from jaxmem import runs
from jaxmem._core.files import read_json
from jaxmem._target.processes.orbax import orbax
from jaxmem._train.checkpoints import manifest, stored
from jaxmem._train.checkpoints.checkpoints import Checkpoints, first_whole, steps_in
from jaxmem._train.runs.record import rows_until
from jaxmem.errors import JaxmemWarning, RunError
from tests.shared.bad import Bad, refusal
from tests.shared.bad_configs import PROGRAMS, bad_configs, trainer_of
from tests.shared.bad_plans import FILE as PLAN
from tests.shared.bad_plans import READERS, bad_plans, full

# A GPT that trains in seconds, under a plan.
SMALL = (
    "model.layers=2", "model.width=32", "model.heads=2", "train.sequence=32", "train.loss_chunk=32",
    "train.batch=4", "plan.budget=90%",
)  # fmt: skip

# -- kills

SETTINGS = (
    *SMALL, "train.steps=40", "train.eval_batches=2", "train.save_every=0", "optimizer.warmup=2",
    "sample.length=20",
)  # fmt: skip
KILLS, ASKED = 200, 60


def start(out: pathlib.Path, said: pathlib.Path) -> subprocess.Popen:
    command = [sys.executable, "-m", "experiments.train", "gpt_nano", *SETTINGS, "--out", str(out)]
    with said.open("wb") as stderr:
        return subprocess.Popen(command, stderr=stderr, stdout=subprocess.DEVNULL)


def rows_of(folder: pathlib.Path) -> list[dict]:
    """The rows that are whole, without what a clock said."""
    rows, _ = rows_until(folder / "metrics.jsonl", sys.maxsize)
    clock = "_seconds", "_second"
    return [{k: v for k, v in row.items() if not k.endswith(clock)} for row in rows]


def unfinished(out: pathlib.Path) -> pathlib.Path:
    """The folder of the run that did not end. There is no such folder if no run saved a step."""
    found = (path for path in out.glob("unfinished-*") if any(path.glob("checkpoints/*")))
    return next(found, out / "nothing saved")


def stop(out: pathlib.Path, number: signal.Signals, wait: float) -> dict:
    """Starts a run, and stops it after so many seconds. `signal` is None if the run ended first."""
    said = out.with_suffix(".said")
    process, sent, acknowledged = start(out, said), None, 0
    try:
        process.wait(wait)
    except subprocess.TimeoutExpired:
        acknowledged = max(steps_in(unfinished(out) / "checkpoints"), default=0)
        sent = number.name
        process.send_signal(number)
    code, path = process.wait(), unfinished(out)
    if (out / "summary.json").exists() or any(out.glob("ended-*")):
        return {"signal": sent, "ended": True}
    steps = steps_in(path / "checkpoints")
    whole = first_whole(path / "checkpoints", steps)  # by its sums
    kept = whole.step if whole else 0
    return {
        "signal": sent,
        "code": code,
        "lost": max(acknowledged - kept, 0),
        "repeated": max(len(rows_of(path)) - kept, 0),
        "traceback": "Traceback" in said.read_text(encoding="utf-8"),
    }


def is_same(out: pathlib.Path, whole: pathlib.Path) -> bool:
    """Whether a run that has ended is the run that was not stopped. Removes it."""
    with contextlib.suppress(RunError), runs.record(out):
        pass  # which moves what a killed process did not, and refuses a folder whose run ended
    told = lambda path: (rows_of(path), read_json(path / "summary.json")["val_loss"])
    same = told(out) == told(whole)
    shutil.rmtree(out)
    return same


def seconds_of(whole: pathlib.Path) -> float:
    """Seconds of a run that is not stopped."""
    began = time.monotonic()
    assert start(whole, whole.with_suffix(".said")).wait() == 0
    return time.monotonic() - began


def kills(report: Report) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells ignore it in the background
    left = [signal.SIGKILL] * KILLS + [signal.SIGTERM, signal.SIGINT] * (ASKED // 2)
    random.Random(0).shuffle(left)
    report.results, lock = {}, threading.Lock()
    with tempfile.TemporaryDirectory() as name, concurrent.futures.ThreadPoolExecutor(2) as pool:
        folder = pathlib.Path(name)
        os.environ["JAX_COMPILATION_CACHE_DIR"] = f"{folder}/cache"
        seconds_of(folder / "first")  # which fills the cache
        whole = folder / "whole"
        seconds = 1.4 * seconds_of(whole)

        def work(out: pathlib.Path) -> None:
            draw = random.Random(out.name)
            with contextlib.suppress(IndexError):  # none is left
                while True:
                    number = left.pop()
                    row = stop(out, number, draw.uniform(0.5, seconds))
                    if row["signal"] is None:
                        left.append(number)
                    if "ended" in row:
                        row["same"] = is_same(out, whole)
                    with lock:
                        report.add(str(len(report.results)), row)

        list(pool.map(work, (folder / "out0", folder / "out1")))


def of_signal(found: list[dict], name: str) -> dict:
    sent = [r for r in found if r["signal"] == name]
    of = [r for r in sent if "ended" not in r]
    return {
        "stopped": len(of),
        "after its run": len(sent) - len(of),
        "codes": dict(sorted(collections.Counter(str(r["code"]) for r in of).items())),
        "steps lost that were saved": sum(r["lost"] for r in of),
        "most steps repeated": max((r["repeated"] for r in of), default=0),
        "tracebacks": sum(r["traceback"] for r in of),
    }


def of_kills(report: Report) -> dict:
    found = list(report.results.values())
    ended = [r for r in found if "ended" in r]
    told = {"ended": len(ended), "as without": sum(r["same"] for r in ended)}
    return told | {name: of_signal(found, name) for name in ("SIGKILL", "SIGTERM", "SIGINT")}


# -- checkpoint_faults

SAVED, COUNT = (10, 20, 30), 1200


def state(step: int):
    """A state in which every array is another one at every step."""
    draw = np.random.default_rng(step)
    make = lambda *shape: jnp.asarray(draw.standard_normal(shape), jnp.float32)
    params = {"w": make(64, 48), "b": make(48), "half": make(64, 48).astype(jnp.bfloat16)}
    moments = jax.tree.map(lambda a: a + a.dtype.type(step), optax.adam(1e-3).init(params))
    return params, moments, jax.random.key(step), jnp.int32(step)


def alike(a, b) -> bool:
    a, b = (stored.taken(tree)[0].values() for tree in (a, b))
    return all(
        np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in zip(a, b, strict=True)
    )


def turned(path: pathlib.Path, draw: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    path.write_bytes(data)


def cut(path: pathlib.Path, draw: random.Random) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: draw.randrange(len(data))])


def of_older(path: pathlib.Path, draw: random.Random) -> None:
    """The file of the same place in the checkpoint before, or of the nearest size where names are
    drawn.
    """
    newest = next(p for p in path.parents if p.name == f"{SAVED[-1]:08d}")
    older = newest.with_name(f"{SAVED[-2]:08d}")
    same = older / path.relative_to(newest)
    others = [p for p in (older / path.parent.relative_to(newest)).glob("*") if p.is_file()]
    others.sort(key=lambda p: abs(p.stat().st_size - path.stat().st_size))
    shutil.copyfile(same if same.exists() else others[0], path)


FAULTS = {
    "a bit turned": turned,
    "cut off": cut,
    "emptied": lambda path, _: path.write_bytes(b""),
    "deleted": lambda path, _: path.unlink(),
    "of an older one": of_older,
}


def by_jaxmem(folder: pathlib.Path) -> str:
    with Checkpoints(folder, 3) as checkpoints, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = checkpoints.newest()
        assert found is not None
        right = alike(found.state(state(0)), state(found.step))
    if not right:
        return "wrong values"
    if found.step == SAVED[-1]:
        return "right values"
    said = any(issubclass(w.category, JaxmemWarning) for w in told)
    return f"the one before, {'with a warning' if said else 'without a word'}"


def by_orbax(folder: pathlib.Path) -> str:
    ocp = orbax()
    names = dict.fromkeys(stored.taken(state(0))[0], 0)
    arguments = dict.fromkeys(names, ocp.RestoreArgs(restore_type=np.ndarray))
    try:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            args = ocp.args.PyTreeRestore(item=names, restore_args=arguments)
            path = folder / f"{SAVED[-1]:08d}" / stored.STATE
            got = checkpointer.restore(path, args=args)
    except Exception:  # of many kinds
        return "an error"
    return "right values" if alike(list(got.values()), state(SAVED[-1])) else "wrong values"


def faulty(whole: pathlib.Path, folder: pathlib.Path, faults: int):
    """Makes so many faults, each in a copy of its own; gives the fault's name and the file."""
    newest = whole / f"{SAVED[-1]:08d}"
    files = sorted(p.relative_to(whole) for p in newest.rglob("*") if p.is_file())
    draw, made = random.Random(0), 0
    while made < faults:
        name, file = draw.choice(list(FAULTS)), draw.choice(files)
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(whole, folder)
        before = (folder / file).read_bytes()
        FAULTS[name](folder / file, draw)
        if (folder / file).exists() and (folder / file).read_bytes() == before:
            continue  # the older file is the same, or an empty one was emptied
        made += 1
        yield name, file


def faults(report: Report) -> None:
    counts = collections.defaultdict(collections.Counter)
    with tempfile.TemporaryDirectory() as scratch:
        whole, folder = pathlib.Path(scratch) / "whole", pathlib.Path(scratch) / "checkpoints"
        with Checkpoints(whole, 3) as checkpoints:
            for step in SAVED:
                checkpoints.save(step, state(step), {})
            checkpoints.wait()
        assert by_jaxmem(whole) == by_orbax(whole) == "right values"
        for name, file in faulty(whole, folder, COUNT):
            outcomes = {"jaxmem": by_jaxmem(folder)}
            if file.name != manifest.NAME:
                outcomes["orbax alone"] = by_orbax(folder)
            for who, outcome in outcomes.items():
                counts[f"{who}, {name}"][outcome] += 1
    report.results = counts


def of_faults(report: Report) -> dict:
    total = collections.defaultdict(collections.Counter)
    for key, row in report.results.items():
        total[key.split(", ")[0]].update(row)
    return total


# -- bad_files

CONFIG = "mine.toml"
Case = tuple[Bad, Callable, list[str]]


def of_configs() -> Iterator[Case]:
    for path in sorted(FOLDER.glob("*.toml")):
        text = path.read_text(encoding="utf-8")
        trainer = trainer_of(text)
        for bad in bad_configs(text, trainer):
            yield bad, PROGRAMS[trainer].main, [CONFIG, "--out", "new"]


def of_plans() -> Iterator[Case]:
    full().save("whole.json")
    new_plan(load("gpt_nano", SMALL)).save("real.json")
    readers = [reader for way, reader in READERS.items() if way != "json"]
    for name in ("whole.json", "real.json"):
        text = pathlib.Path(name).read_text(encoding="utf-8")
        for bad, (main, line) in zip(bad_plans(text), itertools.cycle(readers)):
            yield bad, main, line


def tried(cases: Iterator[Case], file: str) -> dict[str, dict[str, int]]:
    """The files of each kind of mistake, and those that were refused. No file is tried twice."""
    found = collections.defaultdict(lambda: {"files": 0, "refused": 0})
    first: dict[bytes, Case] = {}
    for case in cases:
        first.setdefault(case[0].content, case)
    for bad, main, line in first.values():
        if wrong := refusal(bad, main, line, file):
            print(bad.kind, bad.key, line, wrong, bad.content[:200])
        found[bad.kind]["files"] += 1
        found[bad.kind]["refused"] += not wrong
    return found


def in_a_folder(report: Report) -> None:
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        found = {"configs": tried(of_configs(), CONFIG), "plans": tried(of_plans(), PLAN)}
    report.results |= found


def of_files(report: Report) -> dict:
    total = lambda rows, what: sum(row[what] for row in rows.values())
    return {
        name: {what: total(rows, what) for what in ("files", "refused")}
        for name, rows in report.results.items()
    }


RESULTS = {
    "kills": Benchmark(run=kills, summary=of_kills),
    "checkpoint_faults": Benchmark(run=faults, summary=of_faults),
    "bad_files": Benchmark(run=in_a_folder, summary=of_files),
}

if __name__ == "__main__":
    measure("faults", RESULTS)
