"""Hosts that cannot hold states, and a jaxlib that cannot read them there, are refused."""

import types
from typing import Any

import pytest

from jaxmem._model.states import room
from jaxmem._target.devices import support
from jaxmem.errors import TargetError

pytestmark = pytest.mark.core
GPU: Any = types.SimpleNamespace(platform="gpu")  # as JAX names its platform
CPU: Any = types.SimpleNamespace(platform="cpu")


def test_a_gpu_wants_a_jaxlib_and_a_pool_that_hold_the_states(monkeypatch):
    monkeypatch.setattr(support, "installed", lambda _: "0.11.1")
    room.check_pool(GPU, 64 * 2**30)
    room.check_pool(CPU, 2**50)
    monkeypatch.setenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "60")
    with pytest.raises(TargetError, match=r"60.5 GiB of states.*XLA's pool .* at least 61 when"):
        room.check_pool(GPU, 65 * 10**9)
    monkeypatch.setenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "200")
    room.check_pool(GPU, 199 * 2**30)
    monkeypatch.setattr(support, "installed", lambda _: "0.10.2")
    room.check_pool(GPU, 0)
    with pytest.raises(TargetError, match="jaxlib 0.10.2 reads .* 0.11.1 or later"):
        room.check_pool(GPU, 1)
