"""Checkpoints: what was saved is read back bit for bit, and what was changed since is not used."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmem
from jaxmem._train.checkpoints.checkpoints import Checkpoints
from jaxmem.errors import JaxmemWarning, RunError


def everything():
    """A state of all that states are made of."""
    rng = np.random.default_rng(0)
    params = {"w": jnp.asarray(rng.standard_normal((3, 5)), jnp.float32), "b": jnp.zeros((0, 2))}
    host = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    return {
        "params": params,
        "adamw": optax.adamw(1e-3).init(params),
        "row": jaxmem.adama(1e-3, second_moment="row", accumulation_steps=2).init(params),
        "placed": jax.device_put(jnp.arange(7.0), host),
        "key": jax.random.key(3),
        "keys": jax.random.split(jax.random.key(1, impl="rbg"), 2),
        "numbers": [3, 1.5, True, None],
        "numpy": np.arange(4, dtype=np.int16),
        "weak": [jnp.full((2, 3), 1.5), jnp.full(3, 2), jnp.full(2, 1j), jnp.asarray(0.5)],
        "half": jnp.asarray(rng.standard_normal(9), jnp.bfloat16),
        "small": (jnp.array([1, -2], jnp.int4), jnp.array([0.5], jnp.float8_e4m3fn)),
        "complex": jnp.array([1 + 2j]),
        "flags": jnp.array([True, False]),
        "scalar": jnp.float32(np.nan),
    }


def same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert type(x) is type(y)
        if hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        assert np.asarray(x).dtype == np.asarray(y).dtype
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()
        assert getattr(x, "weak_type", False) == getattr(y, "weak_type", False)


def saved(folder, steps=(10, 20, 30), keep=3, state=None):
    with Checkpoints(folder, keep) as checkpoints:
        for step in steps:
            of_step = {"n": jnp.full((4, 3), step)} if state is None else state
            checkpoints.save(step, of_step, {"of": step})
        checkpoints.wait()
    return folder


def newest(folder):
    with Checkpoints(folder, 3) as checkpoints:
        return checkpoints.newest()


def warned(folder, message, step):
    """The newest usable checkpoint, of this step, beside a later one that is warned of."""
    with pytest.warns(JaxmemWarning, match=message):
        found = newest(folder)
    assert found.step == step
    return found


def value(found):
    return int(found.state({"n": jnp.zeros((4, 3), int)})["n"][0, 0])


def test_every_kind_of_array_comes_back_as_it_was(tmp_path):
    state = everything()
    found = newest(saved(tmp_path / "c", [1], state=state))
    got = found.state(state)
    same(got, state)
    assert got["placed"].sharding == state["placed"].sharding
    assert jax.random.key_impl(got["keys"]) == jax.random.key_impl(state["keys"])


def test_it_is_read_into_shapes(tmp_path):
    state = {"w": jnp.arange(3.0), "key": jax.random.key(3)}
    found = newest(saved(tmp_path / "c", [1], state=state))
    same(found.state(jax.eval_shape(lambda: state)), state)


def test_the_newest_are_kept(tmp_path):
    folder = saved(tmp_path / "c", [1, 2, 3, 4], keep=2)
    assert sorted(p.name for p in folder.iterdir()) == ["00000003", "00000004"]
    found = newest(folder)
    assert (found.step, found.notes, value(found)) == (4, {"of": 4}, 4)
    assert newest(tmp_path / "none") is None


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


FAULTS = {
    "a bit": flip,
    "cut off": lambda path: path.write_bytes(path.read_bytes()[:-2]),
    "empty": lambda path: path.write_bytes(b""),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "gone": lambda path: path.unlink(),
    "a file more": lambda path: path.with_name("more").write_bytes(b"1"),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
}


def files(folder):
    return sorted(p for p in folder.rglob("*") if p.is_file())


@pytest.mark.quick("a bit", "empty", "gone")
@pytest.mark.parametrize("fault", FAULTS)
def test_one_that_was_changed_is_not_used_but_the_one_before(tmp_path, fault):
    whole = saved(tmp_path / "whole")
    count = len(files(whole / "00000030"))
    assert count > 5
    for number in range(count):
        shutil.rmtree(tmp_path / "c", ignore_errors=True)
        folder = shutil.copytree(whole, tmp_path / "c")
        path = files(folder / "00000030")[number]
        FAULTS[fault](path)
        found = warned(folder, "the checkpoint '.*00000030' is not used: ", 20)
        assert value(found) == 20


def test_files_of_the_operating_system_do_no_harm(tmp_path):
    folder = saved(tmp_path / "c")
    for place in [p for p in (folder, *folder.rglob("*")) if p.is_dir()]:
        for name in (".DS_Store", "._000000", "Thumbs.db", ".nfs0000000001", "desktop.ini"):
            (place / name).write_bytes(b"of the system")
    found = newest(folder)
    assert (found.step, value(found)) == (30, 30)
    assert value(newest(saved(folder, [40]))) == 40


def test_checkpoints_and_manifests_that_changed_places_are_not_used(tmp_path):
    folder = saved(tmp_path / "c")
    shutil.copy(folder / "00000020" / "manifest.json", folder / "00000030" / "manifest.json")
    warned(folder, r"manifest.json: it is that of step 20", 20)
    folder = saved(tmp_path / "d")
    shutil.rmtree(folder / "00000030")
    shutil.copytree(folder / "00000010", folder / "00000030")
    warned(folder, r"manifest.json: it is that of step 10", 20)


def test_a_manifest_that_was_written_anew_does_not_have_its_own_sum(tmp_path):
    folder = saved(tmp_path / "c")
    path = folder / "00000030" / "manifest.json"
    data = json.loads(path.read_text())
    path.write_text(json.dumps(data | {"notes": {"of": 31}}))
    warned(folder, "it does not have its own sum", 20)


def test_where_none_is_whole_nothing_begins_again_unasked(tmp_path):
    folder = saved(tmp_path / "c")
    for path in folder.rglob("manifest.json"):
        path.unlink()
    with pytest.warns(JaxmemWarning), pytest.raises(RunError, match="none of them is whole"):
        newest(folder)


@pytest.mark.parametrize(
    ("like", "message"),
    [
        ({"n": jnp.zeros((4, 2), int)}, r"holds \['n'\] int.*\[4, 3\] where the state has"),
        ({"n": jnp.zeros((4, 3), jnp.bfloat16)}, "where the state has .* bfloat16"),
        ({"m": jnp.zeros((4, 3), int)}, r"where the state has \['m'\]"),
        ({"n": jnp.zeros((4, 3), int), "o": 1}, "holds 1 arrays, and the state has 2"),
    ],
)
def test_another_state_is_refused_by_name(tmp_path, like, message):
    found = newest(saved(tmp_path / "c"))
    with pytest.raises(RunError, match=message):
        found.state(like)


def test_where_it_cannot_be_written_the_one_before_is_named(tmp_path):
    folder = saved(tmp_path / "c", [1])
    with Checkpoints(folder, 2) as checkpoints:
        assert checkpoints.newest().step == 1
        (folder / ".writing-00000002").write_text("in the way")
        with pytest.raises(RunError, match=r"cannot write a checkpoint .* of step 1 is whole"):
            checkpoints.save(2, {"n": jnp.zeros(3)}, {})
    assert newest(folder).step == 1


def test_what_a_process_left_unfinished_is_let_go(tmp_path):
    folder = tmp_path / "c"
    (folder / ".writing-00000001" / "state").mkdir(parents=True)
    (folder / ".writing-00000001" / "state" / "half").write_text("a")
    assert newest(folder) is None
    assert value(newest(saved(folder, [1, 2]))) == 2
    assert sorted(p.name for p in folder.iterdir()) == ["00000001", "00000002"]


def test_one_that_was_changed_is_written_over(tmp_path):
    folder = saved(tmp_path / "c", [1, 2])
    (folder / "00000002" / "manifest.json").unlink()
    warned(folder, "00000002' is not used: it has no manifest.json", 1)
    assert value(newest(saved(folder, [2]))) == 2
