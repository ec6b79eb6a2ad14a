"""The library answers as it did when the files beside this one were written."""

import importlib.metadata
import json

import pytest

from tests.golden import golden

pytestmark = [pytest.mark.core, pytest.mark.jax_defaults]


VERSIONS = {name: importlib.metadata.version(name) for name in ("pulp", "highspy")}


def recorded(name: str):
    return json.loads((golden.HERE / f"{name}.json").read_text())


def test_public_names_and_signatures():
    assert golden.public() == recorded("public")


@pytest.mark.parametrize("name", golden.PROFILED)
def test_the_solver_answers_the_same(name):
    found = golden.solved(recorded("profiles")[name])
    want = recorded("solved")[name]
    assert len(found) == len(want)
    for here, before in zip(found, want):
        assert (here is None) == (before is None)
        if here is not None:
            assert here["seconds"] == pytest.approx(before["seconds"], rel=1e-6)
            assert here["saved_bytes"] == before["saved_bytes"]
            # Of assignments that cost the same, versions of PuLP and HiGHS choose different ones.
            if VERSIONS == {"pulp": "3.3.2", "highspy": "1.16.0"}:
                assert here["actions"] == before["actions"]


# Bytes are those of one XLA: that of the pins of Python 3.11.
ONE_XLA = importlib.metadata.version("jaxlib") == "0.10.2"


@pytest.mark.slow
@pytest.mark.skipif(not ONE_XLA, reason="the record is of jaxlib 0.10.2")
@pytest.mark.filterwarnings("default::jaxmem.errors.JaxmemWarning")
@pytest.mark.parametrize("name", golden.PROFILED)
def test_profiles_are_the_same(name, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = golden.rounded(golden.profiled(golden.STEPS[name]))
    assert found == golden.rounded(recorded("profiles")[name])


@pytest.mark.slow
@pytest.mark.skipif(not ONE_XLA, reason="the record is of jaxlib 0.10.2")
@pytest.mark.filterwarnings("default::jaxmem.errors.JaxmemWarning")
@pytest.mark.parametrize("name", recorded("plans"))
def test_plans_are_the_same(name):
    assert golden.plan_of(name) == recorded("plans")[name]
