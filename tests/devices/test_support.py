"""What a target can do follows from the installed jaxlib, whatever its version looks like."""

import jax
import jax.numpy as jnp
import pytest

from jaxmem._core.actions import ALL, LOSSLESS, Action
from jaxmem._core.bytes import show_bytes
from jaxmem._target.devices import support
from jaxmem._target.devices.target import Target
from jaxmem.errors import TagError, TargetError
from tests.shared.refused import refused


@pytest.fixture
def jaxlib(monkeypatch):
    return lambda version: monkeypatch.setattr(support, "installed", lambda _: version)


@pytest.mark.parametrize("version", ["0.11.1", "0.12.0rc1", "0.12.0.1", "0.11.2.dev20260101", "1"])
def test_offload_is_there_since_0_11_1(jaxlib, version):
    jaxlib(version)
    assert support.offload_obstacle(Target.parse("h200")) is None
    assert support.allowed_actions(ALL, Target.parse("h200")) == (ALL, ())


@pytest.mark.parametrize(
    ("actions", "meant"),
    [
        ("all", ALL),
        ("lossless", LOSSLESS),
        ("Keep, RECOMPUTE", (Action.KEEP, Action.RECOMPUTE)),
        ("compress-offload,compress_offload", (Action.COMPRESS_OFFLOAD,)),
        (["Keep", Action.OFFLOAD], (Action.KEEP, Action.OFFLOAD)),
    ],
)
def test_actions_are_read_from_names_in_any_case_and_spacing(jaxlib, actions, meant):
    jaxlib("0.11.2")
    assert support.allowed_actions(actions, Target.parse("h200")) == (meant, ())


@pytest.mark.parametrize("actions", ["all", "Lossless", ALL, LOSSLESS])
def test_what_a_target_cannot_do_is_left_out_of_named_sets(jaxlib, actions):
    jaxlib("0.11.0")
    wanted, notes = support.allowed_actions(actions, Target.parse("h200"))
    assert not any(action.offloads for action in wanted)
    assert "offload is left out" in notes[0]


@refused(
    TagError,
    ("kep", "'kep' is not a valid Action; expected some of keep.*did you mean 'keep'"),
    ("", "'' is not a valid Action"),
    ("keep,,offload", "'' is not a valid Action"),
    ("lossless,compress", "'lossless' is not a valid Action.*'lossless' stands alone"),
    ("losless", "did you mean 'lossless'"),
    ([Action.KEEP, 3], "3 is not a valid Action"),
    (None, "None is not a valid Action"),
)
def test_unknown_actions_are_named(actions):
    support.allowed_actions(actions, Target.parse("h200"))


@pytest.mark.parametrize("version", ["0.10.2", "0.11.0", "0.11.0rc1"])
def test_before_it_is_left_out_and_the_version_is_named(jaxlib, version):
    jaxlib(version)
    actions, notes = support.allowed_actions(LOSSLESS, Target.parse("h200"))
    assert actions == (Action.KEEP, Action.RECOMPUTE)
    assert f"jaxlib {version}" in notes[0]
    with pytest.raises(TargetError, match=f"jaxlib {version}"):
        support.allowed_actions([Action.OFFLOAD], Target.parse("h200"))


FLAG = "--xla_gpu_enable_pipelined_host_offloading"


@pytest.mark.parametrize(
    ("flags", "pipelined"),
    [
        (FLAG, True),
        (f"--xla_dump_to=a {FLAG}=true --xla_b=1", True),
        (f"{FLAG}=1", True),
        (f"{FLAG}=true {FLAG}=false", False),
        (f"{FLAG}=false", False),
        (f"{FLAG}_depth=2", False),
        ("", False),
    ],
)
def test_pipelined_host_transfers_leave_offload_out_on_gpus(jaxlib, monkeypatch, flags, pipelined):
    jaxlib("0.11.2")
    monkeypatch.setenv("XLA_FLAGS", flags)
    for gpu in ("h200", "a100-80gb:8"):
        target = Target.parse(gpu)
        actions, notes = support.allowed_actions(ALL, target)
        assert (Action.OFFLOAD in actions) == (not pipelined)
        if pipelined:
            assert f"{FLAG}=false" in notes[0], "the remedy"
            with pytest.raises(TargetError, match="45393"):
                support.allowed_actions("offload", target)
    assert support.allowed_actions(ALL, Target.parse("v5e")) == (ALL, ())


@pytest.mark.parametrize(("name", "place"), [("local", "on this machine"), ("t4:2", "on 't4'")])
def test_a_budget_beyond_the_memory_is_said(name, place):
    target = Target.parse(name)
    assert support.budget_notes(target.usable_bytes, target) == ()
    (note,) = support.budget_notes(2**50, target)
    assert f"the budget is 1024.0 TiB, and a program {place} can use" in note
    assert show_bytes(target.usable_bytes) in note


@pytest.mark.jax_defaults
def test_layers_without_a_loop_save_on_a_cpu_where_it_is_said():
    """Six layers of which a checkpoint saves nothing, against the same that are kept."""

    def layer(w, x):
        return x + jnp.sin(jnp.sin(x @ w) @ w.T)

    def temporaries(block):
        def loss(ws, x):
            for w in ws:
                x = block(w, x)
            return (x * x).sum()

        f32 = jnp.float32
        args = [jax.ShapeDtypeStruct((64, 512), f32)] * 6, jax.ShapeDtypeStruct((256, 64), f32)
        return jax.jit(jax.grad(loss)).lower(*args).compile().memory_analysis().temp_size_in_bytes

    share = temporaries(jax.checkpoint(layer)) / temporaries(layer)
    if support.unrolled_obstacle(Target.parse("local")) is None:
        assert share < 0.6
    else:
        assert share > 0.9
