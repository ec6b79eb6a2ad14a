"""Faults in stored checkpoints: what `jaxmem.runs` makes of them, and orbax alone.

    python -m benchmarks.checkpoint_faults [--faults N]

Three checkpoints of a small state are kept, as a run keeps them. A fault is made in one file of the
newest: a bit turned, cut off, emptied, deleted, or the file of an older checkpoint in its place, or
its manifest. Then the newest state is asked for, which all arrays are compared with. orbax alone
reads the same files but for the manifest, so that faults in manifests are not its.
"""

import collections
import pathlib
import random
import shutil
import tempfile
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.shared.results import Report
from jaxmem._target.processes.orbax import orbax
from jaxmem._train.checkpoints import manifest, stored
from jaxmem._train.checkpoints.checkpoints import Checkpoints
from jaxmem.errors import JaxmemWarning

STEPS = (10, 20, 30)


def state(step: int):
    """A state in which every array is another one at every step."""
    draw = np.random.default_rng(step)
    make = lambda *shape: jnp.asarray(draw.standard_normal(shape), jnp.float32)
    params = {"w": make(64, 48), "b": make(48), "half": make(64, 48).astype(jnp.bfloat16)}
    moments = jax.tree.map(lambda a: a + a.dtype.type(step), optax.adam(1e-3).init(params))
    return params, moments, jax.random.key(step), jnp.int32(step)


def alike(a, b) -> bool:
    data = lambda leaf: (
        jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
    )
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.asarray(data(x)).tobytes() == np.asarray(data(y)).tobytes() for x, y in pairs)


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
    newest = next(p for p in path.parents if p.name == f"{STEPS[-1]:08d}")
    older = newest.with_name(f"{STEPS[-2]:08d}")
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
    said = [w for w in told if issubclass(w.category, JaxmemWarning)]
    if not right:
        return "wrong values"
    if found.step == STEPS[-1]:
        return "right values"
    return "the one before, with a warning" if said else "the one before, without a word"


def by_orbax(folder: pathlib.Path) -> str:
    ocp = orbax()
    names = dict.fromkeys(stored.taken(state(0))[0], 0)
    arguments = dict.fromkeys(names, ocp.RestoreArgs(restore_type=np.ndarray))
    try:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            args = ocp.args.PyTreeRestore(item=names, restore_args=arguments)
            path = folder / f"{STEPS[-1]:08d}" / stored.STATE
            got = checkpointer.restore(path, args=args)
    except Exception:  # of many kinds
        return "an error"
    want, _ = stored.taken(state(STEPS[-1]))
    return "right values" if alike(list(got.values()), list(want.values())) else "wrong values"


def faulty(whole: pathlib.Path, folder: pathlib.Path, faults: int):
    """Makes so many faults, each in a copy of its own; gives the fault's name and the file."""
    newest = whole / f"{STEPS[-1]:08d}"
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


def summary(report: Report) -> dict:
    total: dict[str, collections.Counter] = {}
    for key, row in report.results.items():
        total.setdefault(key.split(", ")[0], collections.Counter()).update(row)
    return total


def main() -> None:
    report = Report("checkpoint_faults", faults=1200)
    counts: dict[str, collections.Counter] = {}
    with tempfile.TemporaryDirectory() as scratch:
        whole, folder = pathlib.Path(scratch) / "whole", pathlib.Path(scratch) / "checkpoints"
        with Checkpoints(whole, 3) as checkpoints:
            for step in STEPS:
                checkpoints.save(step, state(step), {})
            checkpoints.wait()
        assert by_jaxmem(whole) == by_orbax(whole) == "right values"
        for name, file in faulty(whole, folder, report.chosen["faults"]):
            outcomes = {"jaxmem": by_jaxmem(folder)}
            if file.name != manifest.NAME:
                outcomes["orbax alone"] = by_orbax(folder)
            for who, outcome in outcomes.items():
                counts.setdefault(f"{who}, {name}", collections.Counter())[outcome] += 1
    report.results = dict(counts)
    report.summarise(summary(report))


if __name__ == "__main__":
    main()
