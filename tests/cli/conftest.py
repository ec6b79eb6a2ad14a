"""A folder with steps to plan, plans and broken files, in which command lines are run."""

import os
import sys

import pytest

from tests.shared.plans import other, plan

STEPS = """
import sys
import jax, jax.numpy as jnp, jaxmem

def layer(x, w):
    h = jaxmem.tag(x @ w, "h", kind="linear")
    return x + jnp.sin(h) @ w.T

def build(plan, microbatches=1):
    block = jax.checkpoint(layer, policy=jaxmem.remat_policy(plan), prevent_cse=False)
    def loss(params, x):
        return (jax.lax.scan(lambda x, w: (block(x, w), None), x, params)[0] ** 2).mean()
    def step(params, x):
        parts = x.reshape(microbatches, -1, x.shape[-1])
        grads = jax.lax.map(lambda part: jax.grad(loss)(params, part), parts)
        return params - grads.sum(0)
    return step

def alone(plan):
    return build(plan)

shape = lambda *s: jax.ShapeDtypeStruct(s, jnp.float32)
def untagged(x, w):
    return x + jnp.sin(x @ w) @ w.T, None
def untagged_loss(params, x):
    return (jax.lax.scan(untagged, x, params)[0] ** 2).mean()
def whole(params, x):
    return params - jax.grad(untagged_loss)(params, x)
def a_step(): return whole, shape(4, 32, 32), shape(256, 32)
def small(): return build, shape(4, 32, 32), shape(256, 32)
def rows(): return build, shape(4, 32, 32), lambda n: shape(n, 32)
def tiny(): return build, shape(2, 8, 8), shape(16, 8)
def one_number(): return alone, shape(2, 8, 8), shape(16, 8)
def wrong_shapes(): return build, shape(4, 32, 32), shape(256, 33)
def no_arguments(): return (build,)
def no_step(): return (lambda plan: 3), shape(4)
def an_empty_tuple(): return ()
def strings(): return "build", 3
def with_step(step): return (lambda plan: step), shape(4), shape(4)

def takes_no_plan(): return (lambda: 3), shape(4)
def misnamed_tag(): return with_step(lambda w, x: jaxmem.tag(x, 3))  # misnamed_tag
def raises(): raise RuntimeError("no data here")  # raises
def opens(): open("absent.bin")  # opens
def exits(): sys.exit(0)  # exits
def exits_with_a_text(): sys.exit("no flags")  # exits_with_a_text
def interrupts(): raise KeyboardInterrupt
def chained():
    try:
        raises()
    except RuntimeError as error:
        raise ValueError("from below") from error  # chained
def build_raises(): return (lambda plan: {}["missing"]), shape(4)  # build_raises
def build_type_error(): return (lambda plan: len(3)), shape(4)  # build_type_error
def build_exits(): return (lambda plan: sys.exit()), shape(4)  # build_exits
def step_raises():
    def step(w, x):
        raise ValueError("bad step")  # step_raises
    return with_step(step)
def step_branches():
    def step(w, x):
        return w if x.sum() > 0 else x  # step_branches
    return with_step(step)
def step_exits(): return with_step(lambda w, x: sys.exit(7))  # step_exits
def talks():
    print("reading data")
    return tiny()
class Kind: pass
number = 3
"""
FILES = {
    "steps.py": STEPS,
    "broken.py": "import os\nimport nothing_of_this_name  # broken\n",
    "syntax.py": "import os\nx = 1 +\n",
    "uses_syntax.py": "import syntax\n",
    "ends.py": "import sys\n\nsys.exit(3)  # ends\n",
    "raising.py": "def f():\n    raise KeyError('gone')  # raising\n\n\nf()\n",
    "text.json": "not json",
    "list.json": "[]",
    "other.json": '{"schema": 99}',
}


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    """What was timed in one test is known in the next."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def folder(tmp_path, cache, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
        monkeypatch.delitem(sys.modules, name.removesuffix(".py"), raising=False)
    plan().save("plan.json")
    other().save("second.json")
    plan(target="local").save("local.json")
    (tmp_path / "folder").mkdir()
    os.link("plan.json", "hard.json")
    os.symlink("new.json", "link.json")  # which is not there yet
    yield tmp_path
    for name in FILES:
        sys.modules.pop(name.removesuffix(".py"), None)
