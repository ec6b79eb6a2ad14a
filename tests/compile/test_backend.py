"""What a deviceless backend does around a compile, with a compiler that answers at once."""

import concurrent.futures
import logging
from typing import ClassVar

import jax
import jax.numpy as jnp
import pytest

import jaxmem
from jaxmem._core.assignment import Assignment
from jaxmem._core.database import Database
from jaxmem._target.compile.backend import Deviceless
from jaxmem._target.compiled.compiled import Compiled
from jaxmem._target.devices.target import Target
from jaxmem._trace.step import trace
from jaxmem.errors import JaxmemWarning, TargetError
from tests.released.test_streamed_deviceless import STACK

pytestmark = pytest.mark.usefixtures("own_cache")
ANSWER = Compiled(10, 4, 5, 2, 1, 0, 1e-3, 100, 1, 0.5)


class Answers:
    """In the place of a `Compiler`."""

    asked: ClassVar[list[str]] = []

    def __init__(self, target, workers):
        self.target = target

    def submit(self, exported, *, donated=(), options=None, assigned=False, kernels=(), free=False):
        self.asked.append(str(self.target))
        future = concurrent.futures.Future()
        future.set_result(ANSWER)
        return future

    def close(self):
        return


@pytest.fixture
def backend(monkeypatch):
    monkeypatch.setattr("jaxmem._target.compile.backend.Compiler", Answers)
    monkeypatch.setattr(Answers, "asked", [])
    return lambda name: Deviceless(Target.parse(name))


def step(size: int):
    args = (jax.ShapeDtypeStruct((size, 8), jnp.float32),)
    return trace(lambda _: lambda x: x + 1, None, args)


def test_devices_that_the_step_is_not_sharded_over_are_told_once(backend):
    eight = backend("h200:8")
    with pytest.warns(JaxmemWarning, match="'h200:8' has 8 devices.*the other 7 would idle") as w:
        eight.compile_fully(*step(16)).result()
    assert len(w) == 1
    assert "or plan for 'h200'" in str(w[0].message)
    eight.compile_fully(*step(24)).result()  # a warning would be an error
    with pytest.warns(JaxmemWarning, match="'v3' has 2 devices") as w:
        backend("v3").compile_fully(*step(16)).result()
    assert str(w[0].message).endswith("over a mesh of 2 devices"), "no smaller target to plan for"


def test_arguments_in_host_memory_want_a_jaxlib_that_reads_them(backend, monkeypatch):
    args = (STACK,)
    stage, traced = trace(lambda _: lambda x: x, None, args)
    h200 = backend("h200")
    wants = r"host memory, and .* 'h200' jaxlib 0.11.0 reads .* 0.11.1 or later"
    monkeypatch.setattr("jaxmem._target.devices.support.installed", lambda _: "0.11.0")
    with pytest.raises(TargetError, match=wants):
        h200.compile_fully(stage, traced)
    with pytest.raises(TargetError, match=wants):
        h200.explain(traced)
    build = lambda _: lambda x: x
    for ask in (
        lambda: jaxmem.plan(build, *args, target="h200", budget="1GiB"),
        lambda: jaxmem.plans.price(build, Assignment({}), *args, target="h200"),
        lambda: jaxmem.plans.estimate(build, Assignment({}), *args, target="h200"),
        lambda: jaxmem.explain(build, *args, target="h200"),
    ):
        with pytest.raises(TargetError, match=wants):
            ask()
    h200.compile_fully(*step(16)).result()  # without such arguments any release will do
    monkeypatch.setattr("jaxmem._target.devices.support.installed", lambda _: "0.11.1")
    h200.compile_fully(stage, traced).result()


def test_a_database_that_fails_does_not_stop_a_compile(backend, monkeypatch, caplog):
    """A warning that it gives may be an error, in the thread that hands the result over."""

    def fails(*_):
        raise JaxmemWarning("the database was damaged")

    monkeypatch.setattr(Database, "write_compile", fails)
    caplog.set_level(logging.CRITICAL)
    assert backend("h200").compile_fully(*step(32)).result(timeout=60) == ANSWER


def test_what_was_compiled_is_not_compiled_again(backend):
    compilers = [backend("h200"), backend("h200"), backend("t4")]
    for one in (compilers[0], *compilers):
        assert one.compile_fully(*step(40)).result() == ANSWER
    assert Answers.asked == ["h200", "t4"]


def test_what_libtpu_compiled_under_other_flags_is_compiled_again(backend, monkeypatch):
    for flags in (None, "--xla_tpu_scoped_vmem_limit_kib=65536", None):
        if flags is None:
            monkeypatch.delenv("LIBTPU_INIT_ARGS", raising=False)
        else:
            monkeypatch.setenv("LIBTPU_INIT_ARGS", flags)
        for name in ("v5e", "h200"):
            assert backend(name).compile_fully(*step(48)).result() == ANSWER
    assert Answers.asked == ["v5e", "h200", "v5e"], "each once, and a TPU for its flags"
