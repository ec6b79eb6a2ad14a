"""Tensors that no tag names are told by the user's file and line, the largest first."""

import functools
import inspect
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem
from jaxmem._core.assignment import Assignment
from jaxmem._core.bytes import parse_budget
from jaxmem._cost.blocks.unnamed import unnamed
from jaxmem._cost.profile.profile import block_classes
from jaxmem._trace.step import trace
from jaxmem.errors import JaxmemWarning
from tests.shared import models

pytestmark = pytest.mark.jax_defaults
LAYERS, BATCH, SEQUENCE, WIDTH = 3, 4, 16, 32
SHAPES = models.shapes(LAYERS, WIDTH, BATCH, SEQUENCE)
X = LAYERS * BATCH * SEQUENCE * WIDTH * 4


def without_tags(x, p, _):
    y = jnp.sin(x @ p["a"])
    wide = jnp.tanh(y @ p["up"]) + jax.lax.stop_gradient(3.0)
    return x + wide @ p["down"]


def with_tags(x, p, _):
    product = jaxmem.tag(x @ p["a"], "product")
    y = jaxmem.tag(jnp.sin(product), "y").reshape(x.shape)
    return x + jnp.tanh(y @ p["up"]) @ p["down"]


def line_of(function, text: str) -> str:
    lines, start = inspect.getsourcelines(function)
    (number,) = [start + i for i, line in enumerate(lines) if text in line]
    return f"test_unnamed.py:{number}:"


def build_of(block):
    return models.build_with(functools.partial(models.scanned, block=block))


def found_in(block, shards=1):
    return unnamed(trace(build_of(block), Assignment.nothing(), SHAPES)[1].jaxpr, shards)


def bytes_in(text: str) -> int:
    """The bytes at the end of a text, which are whole KiB here."""
    return parse_budget(text.rpartition(": ")[2], 0)


def test_each_has_its_shape_its_operations_its_line_and_the_bytes_of_all_layers():
    wide, narrow = found_in(without_tags)
    pattern = re.escape(f"float32[{BATCH},{SEQUENCE},{2 * WIDTH}]")
    (many,) = re.findall(rf"^(?:(\d+) x )?{pattern} \(", wide)
    assert line_of(without_tags, "jnp.tanh") in wide
    assert bytes_in(wide) == 2 * X * int(many or 1)  # as many as this JAX's derivative reads
    array = f"float32[{BATCH},{SEQUENCE},{WIDTH}]"
    assert narrow.startswith(f"2 x {array} (sin, cos) at ")
    assert line_of(without_tags, "jnp.sin") in narrow
    assert bytes_in(narrow) == 2 * X


def test_a_label_selects_the_tensors_of_its_block():
    jaxpr = trace(build_of(without_tags), Assignment.nothing(), SHAPES)[1].jaxpr
    assert unnamed(jaxpr, label="block") == unnamed(jaxpr)
    assert unnamed(jaxpr, label="another") == []


def test_what_a_tag_names_and_views_of_it_are_left_out():
    wide, cosine = found_in(with_tags)
    assert line_of(with_tags, "jnp.tanh") in wide
    assert "] (cos) at" in cosine, "the sine has a tag, and its derivative's cosine has none"


def test_bytes_are_those_that_everything_kept_adds():
    """The sum is what the block keeps without a checkpoint, less its input."""
    (block,) = block_classes(trace(build_of(without_tags), Assignment.nothing(), SHAPES)[1].jaxpr)
    inputs = sum(block.values[v] for v in block.inputs if v in block.needed)
    kept = block.layers * (block.everything_bytes - inputs)
    whole = [bytes_in(text) for text in found_in(without_tags)]
    assert sum(whole) == kept
    assert [bytes_in(text) for text in found_in(without_tags, 2)] == [size // 2 for size in whole]


def test_a_plan_warns_of_a_block_without_tags():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        plan = jaxmem.plan(build_of(without_tags), *SHAPES)
    (told,) = [str(w.message) for w in caught if issubclass(w.category, JaxmemWarning)]
    assert "block 'block' has no tag" in told
    assert line_of(without_tags, "jnp.tanh") in told
    assert re.search(r"\(sin, cos\) at \S*test_unnamed.py:\d+:\d+ \(without_tags\): 48.0 KiB", told)
    assert plan.keeps_everything


def test_explain_names_untagged_tensors_where_they_hold_most():
    big = models.shapes(8, 16, 64, 64)
    advice = jaxmem.explain(build_of(without_tags), *big).advice
    assert advice.startswith("untagged tensors hold most")
    assert line_of(without_tags, "jnp.tanh") in advice


def test_a_budget_error_names_what_to_tag_where_saved_tensors_are_the_largest_part():
    """The block's input, which is kept at the least, is larger than the other parts here."""

    big = models.shapes(64, 16, 8, 64)
    with pytest.raises(jaxmem.errors.BudgetError, match="largest part is tensors saved") as caught:
        jaxmem.plan(build_of(with_tags), *big, budget=2**20)
    assert "or tag more tensors; the largest tensors that no tag names are" in str(caught.value)
    assert line_of(with_tags, "jnp.tanh") in str(caught.value)
    assert np.isfinite(caught.value.least_bytes)
