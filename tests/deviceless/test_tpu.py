"""Steps compiled for TPUs that are not there."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmem
from jaxmem._core.actions import Action, Choice
from jaxmem._core.assignment import Assignment
from jaxmem._target.deviceless.compiler import Compiler
from jaxmem._target.deviceless.wheels import libtpu_command, require_wheels
from jaxmem._target.devices.target import Target
from jaxmem._target.devices.tiles import tiled_bytes
from jaxmem._trace.export import export_flat
from jaxmem._trace.step import trace
from jaxmem.errors import StepError, TargetError
from tests.shared import models

pytestmark = pytest.mark.jax_defaults  # 64-bit counters of loops are two numbers on a TPU

LAYERS, WIDTH, ROWS = 4, 256, 512
KEEP, OFFLOAD = Choice(Action.KEEP), Choice(Action.OFFLOAD)
WHOLE = P()


def layer(x_RD, w):
    x_RD = jaxmem.tag(x_RD, "in", kind="residual")
    up_RF = jaxmem.tag(x_RD @ w["up"], "up", kind="linear")
    return x_RD + jax.nn.gelu(up_RF) @ w["down"]


build = models.build_in_float32(layer)


def arguments(width=WIDTH, rows=ROWS, over=None, weights=WHOLE, batch=WHOLE):
    def shape(sizes, spec):
        sharding = None if over is None else NamedSharding(over, spec)
        return jax.ShapeDtypeStruct(sizes, jnp.bfloat16, sharding=sharding)

    w = {
        "up": shape((LAYERS, width, 4 * width), weights),
        "down": shape((LAYERS, 4 * width, width), weights),
    }
    return w, shape((rows, width), batch)


def exported(choices=None, **sizes):
    plan = Assignment({"block": choices or {}})
    _, traced = trace(build, plan, arguments(**sizes))
    return export_flat(traced, "tpu")


def compiled(compiler, choices=None, assigned=True, **sizes):
    blob, donated = exported(choices, **sizes)
    return compiler.submit(blob, donated=donated, assigned=assigned).result(timeout=300)


@pytest.fixture(scope="module")
def v5e():
    with Compiler("v5e", workers=1) as compiler:
        yield compiler


def test_buffers_are_those_of_the_whole_compile_and_hold_what_is_saved(v5e):
    """The one test of `make test` that has libtpu generate code."""
    assigned, whole = compiled(v5e), compiled(v5e, assigned=False)
    assert abs(assigned.total_bytes - whole.total_bytes) < 64 * 1024
    for one in (assigned, whole):
        assert one.total_bytes == (
            one.argument_bytes + one.temp_bytes + one.output_bytes - one.alias_bytes
        )
        assert one.alias_bytes >= 2 * 8 * LAYERS * WIDTH * WIDTH
        assert (one.host_bytes, one.xla_seconds is None) == (0, False)
    assert assigned.matmul_flops == whole.matmul_flops
    assert assigned.xla_seconds == pytest.approx(whole.xla_seconds, rel=0.05)
    # What a plan keeps more is there to the byte, whatever else the compiler moves.
    kept = compiled(v5e, {"up": KEEP})
    assert kept.matmul_flops == assigned.matmul_flops - 2 * LAYERS * ROWS * WIDTH * 4 * WIDTH


def scaled(w_LD, x_RD):
    """A step without products, of which code is generated soonest."""

    def loss(w_LD):
        y_RD, _ = jax.lax.scan(lambda x, w: (jnp.sin(x * w), None), x_RD, w_LD)
        return (y_RD.astype(jnp.float32) ** 2).mean()

    return w_LD - jax.grad(loss)(w_LD)


def test_what_is_explained_adds_up(v5e):
    rows = 65536  # of so many no stack fits into a core
    shapes = [jax.ShapeDtypeStruct((n, WIDTH), jnp.bfloat16) for n in (LAYERS, rows)]
    blob, donated = export_flat(jax.jit(scaled, donate_argnums=0).trace(*shapes), "tpu")
    read, peak = v5e.explain(blob, donated=donated)
    held = sum(h.bytes for h in peak.held if not h.host)
    assert 0 <= read.total_bytes - held < 16 * 1024, "scalar constants are all that is left out"
    assert any((h.dtype, h.shape) == ("bf16", (LAYERS, rows, WIDTH)) for h in peak.held)
    assert peak.lives


def test_what_is_offloaded_is_on_the_host(v5e):
    one = compiled(v5e, {"in": OFFLOAD, "up": OFFLOAD}, rows=4096)
    assert one.host_bytes == LAYERS * sum(
        tiled_bytes((4096, width), 2) for width in (WIDTH, 4 * WIDTH)
    )


def test_more_than_the_device_has_is_told_as_it_was_written(v5e):
    one = compiled(v5e, {"in": KEEP, "up": KEEP}, rows=2**22)
    saved = LAYERS * 2**22 * 5 * WIDTH * 2
    assert one.total_bytes > saved > Target.parse("v5e").usable_bytes
    assert one.matmul_flops == 6 * LAYERS * 2 * 2**22 * WIDTH * 4 * WIDTH


def test_a_mesh_is_laid_over_the_slice():
    mesh = AbstractMesh((4,), ("fsdp",), axis_types=(AxisType.Auto,))
    with Compiler("v5e:2x2", workers=1) as compiler:
        divided = compiled(compiler, over=mesh, weights=P(None, "fsdp"), batch=P("fsdp"))
        whole = compiled(compiler, over=mesh, batch=P("fsdp"))
        eight = AbstractMesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))
        with pytest.raises(StepError, match="sharded over 8 devices, but the target has 4"):
            compiled(compiler, over=eight, batch=P("fsdp"))
    weights = 2 * 8 * LAYERS * WIDTH * WIDTH
    assert whole.argument_bytes - divided.argument_bytes == weights * 3 // 4


@pytest.mark.slow
@pytest.mark.parametrize("name", ["v2", "v3", "v4", "v5e", "v5p", "v6e", "tpu7x"])
def test_every_generation_compiles(name):
    with Compiler(name, workers=1) as compiler:
        one = compiled(compiler, assigned=False)
        assert one.matmuls == 7 * LAYERS
        over = compiled(compiler, {"in": KEEP, "up": KEEP}, rows=2**25, assigned=False)
    assert over.total_bytes > Target.parse(name).usable_bytes


@pytest.mark.slow
@pytest.mark.parametrize("name", ["v4:2x2x2", "v5p:2x2x2", "v6e:2x4", "tpu7x:2x2x1", "v3:2x2"])
def test_slices_of_every_kind(name):
    count = Target.parse(name).devices
    assert count == 8
    mesh = AbstractMesh((count,), ("fsdp",), axis_types=(AxisType.Auto,))
    with Compiler(name, workers=1) as compiler:
        one = compiled(
            compiler, over=mesh, weights=P(None, "fsdp"), batch=P("fsdp"), assigned=False
        )
    assert one.total_bytes > 0
    assert one.xla_seconds > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["v5e", "v5p", "v6e"])
def test_memory_is_what_the_compiler_lets_a_program_take(name):
    """A step of 8 MiB under it compiles, of as much over it does not."""
    # So short are the rows that a tile's rows, which an array is padded to, are 1 MiB at most.
    usable, side = Target.parse(name).usable_bytes, 2**14
    with Compiler(name, workers=1) as compiler:

        def fits(nbytes):
            rows = nbytes // (2 * side * 2)
            shape = jax.ShapeDtypeStruct((rows, side), jnp.bfloat16)
            blob, _ = export_flat(jax.jit(lambda a: a + 1).trace(shape), "tpu")
            read = compiler.submit(blob).result(timeout=300)
            return read.total_bytes <= usable

        assert fits(usable - 2**23)
        assert not fits(usable + 2**23)


def test_a_missing_libtpu_names_the_command(monkeypatch):
    target = Target.parse("v6e:4x4")
    require_wheels(target)
    from jaxmem._target.deviceless import wheels

    for found, got in ((None, "none"), ("0.0.1", "0.0.1")):
        monkeypatch.setattr(
            wheels, "installed", lambda name, found=found: found if name == "libtpu" else "0.10.2"
        )
        with pytest.raises(TargetError, match=f"'v6e:4x4' .* libtpu.* got {got}. ") as error:
            Compiler(target)
        assert libtpu_command() in str(error.value)
        assert "jaxmem[tpu]" in str(error.value)


def test_what_differs_between_devices_is_told_to_the_process():
    one, other = (Compiler(name)._device for name in ("v4", "v5e"))
    assert (one["config"], other["config"]) == ("megacore", "")
    assert one["rates"] != other["rates"]
    assert dataclasses.asdict(Target.parse("v4"))["shape"] == (1, 1, 1)
