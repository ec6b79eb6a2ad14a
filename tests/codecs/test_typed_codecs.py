"""Codecs, and a plan, on a mesh whose axes are explicit, as `jax.make_mesh` makes them."""

from tests.shared import children


def test_codecs_take_arrays_however_their_types_divide_them():
    found = children.printed(children.with_cpus(4), "tests.programs.typed_codecs")
    assert found["wrong"] == []
    kept, recomputed, compressed = found["errors"]
    assert (kept, recomputed < 1e-5) == (0, True)
    assert 1e-4 < compressed < 0.2, "gradients of compressed tensors"
    assert len(found["before"]) == 2
