"""Which plans MaxText's flags express, and which executables MaxText loads."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.serialize_executable import deserialize_and_load

import jaxmem
from jaxmem._core.actions import KEEP, OFFLOAD, RECOMPUTE, UNTAGGED
from jaxmem._model.states.places import HOST, Places
from jaxmem.errors import StepError, TagError
from tests.shared import plans
from tests.shared.refused import refused

DECIDED = {"query_proj": KEEP, "context": OFFLOAD, "mlpwi_0": RECOMPUTE}


def plan(**changes) -> jaxmem.Plan:
    return plans.plan(**({"actions": {"block": DECIDED}} | changes))


def test_each_tensor_has_a_location():
    assert plan().to_maxtext() == {
        "remat_policy": "custom",
        "decoder_layer_input": "remat",
        "query_proj": "device",
        "context": "offload",
        "mlpwi_0": "remat",
    }


def test_the_input_of_a_layer_is_where_the_plan_stores_it():
    decided = {"block": DECIDED | {"decoder_layer_input": OFFLOAD}}
    assert plan(actions=decided).to_maxtext()["decoder_layer_input"] == "offload"


def test_blocks_that_agree_share_the_flags():
    """A block through which no gradient runs has no tags."""
    both = {"block": DECIDED, "local": DECIDED | {"mlpwo": KEEP}, "idle": {}}
    assert plan(actions=both).to_maxtext() == plan().to_maxtext() | {"mlpwo": "device"}


def test_names_of_another_maxtext_are_given():
    unknown = {"block": DECIDED | {"engram": KEEP}}
    with pytest.raises(TagError, match="'engram' of block 'block'.*mlpwi_0"):
        plan(actions=unknown).to_maxtext()
    names = {*DECIDED, "engram"}
    found = plan(actions=unknown).to_maxtext(names)
    assert found["engram"] == "device"
    assert found.keys() == names | {"remat_policy"}, "this MaxText has no decoder_layer_input"


@refused(
    ValueError,
    ({"actions": {"block": DECIDED | {"key_proj": plans.UP}}}, "compresses 'key_proj'"),
    ({"actions": {"auto": {"dot_general": KEEP}}}, "'dot_general' of block 'auto'"),
    ({"actions": {"block": {UNTAGGED: KEEP}}}, "without a checkpoint"),
    ({"actions": {"block": DECIDED, "local": {UNTAGGED: KEEP}}}, "'local' without a checkpoint"),
    ({"actions": {"block[0:2]": DECIDED, "block[2:8]": {}}}, r"'block\[0:2\]'"),
    ({"actions": {"block": DECIDED, "local": {"context": KEEP}}}, "'context' differently"),
    ({"actions": {}, "as_written": True}, "as written"),
    ({"places": Places(24, 6, 6, 6, HOST)}, "model states"),
    ({"divided": "moments"}, "model states"),
)
def test_a_plan_that_flags_cannot_express_is_refused(changes):
    plan(**changes).to_maxtext()


def step(w, x):
    value, gradient = jax.value_and_grad(lambda w: (jnp.sin(x @ w) ** 2).mean())(w)
    return w - 0.1 * gradient, value


def test_a_saved_executable_is_loaded_as_maxtext_loads_it(tmp_path):
    """`maxtext_utils.load_compiled` deserializes the file with the trees of the step."""
    args = jnp.linspace(0.0, 1.0, 12).reshape(3, 4), jnp.ones((5, 3))
    made = plan().with_step(jax.jit(step).lower(*args).compile())
    made.save_compiled(tmp_path / "new" / "step.pickle")
    trees = jax.tree.structure((args, {})), jax.tree.structure(jax.eval_shape(step, *args))
    loaded = deserialize_and_load((tmp_path / "new" / "step.pickle").read_bytes(), *trees)
    jax.tree.map(np.testing.assert_array_equal, loaded(*args), made.step(*args))


@pytest.mark.parametrize(
    ("made", "said"),
    [(plan(), "no executable.*'h200'"), (plan().with_step(object()), "executable is object")],
)
def test_what_maxtext_cannot_load_is_not_written(made, said, tmp_path):
    with pytest.raises(StepError, match=said):
        made.save_compiled(tmp_path / "step.pickle")
    assert not list(tmp_path.iterdir())
