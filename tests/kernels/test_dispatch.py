"""Kernels where CUDA is lowered for and nowhere else; references where a kernel is missing, or does
not take a tensor.
"""

import pickle
import sys
import warnings

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

import jaxmem_kernels as jk
from jaxmem_kernels.gpu import adapter, choice
from tests.shared import children
from tests.shared.refused import refused

HOW = {"group": 64, "scale": "bfloat16", "stochastic": False}


def lowered(function, *shapes, platform="cuda", at=90):
    arguments = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]
    with jk.compiling_for(at):
        return jax.jit(function).trace(*arguments).lower(lowering_platforms=(platform,)).as_text()


@pytest.fixture
def kernels():
    pytest.importorskip("jax_triton", reason="kernels")
    adapter.is_there.cache_clear()


@pytest.mark.usefixtures("kernels")
def test_cuda_gets_a_kernel_and_other_platforms_the_reference():
    quantize = lambda x: jk.quantize(x, **HOW)
    assert lowered(quantize, ((512, 256), "bfloat16")).count("triton_kernel_call") == 1
    assert "triton_kernel_call" not in lowered(quantize, ((512, 256), "bfloat16"), platform="cpu")


@pytest.mark.usefixtures("kernels")
def test_under_scan_vmap_remat_and_shard_map_it_is_the_kernel():
    quantize = lambda x: jk.quantize(x, **HOW)
    scanned = lambda x: jax.lax.scan(lambda c, row: (c, quantize(row)), 0, x)
    mapped = jax.vmap(quantize, 2)
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    over = {"mesh": mesh, "in_specs": PartitionSpec("data"), "out_specs": PartitionSpec("data")}
    sharded = jax.shard_map(quantize, **over)
    unchecked = jax.shard_map(quantize, **over, check_vma=False)
    remat = jax.grad(jax.checkpoint(lambda x: (x * quantize(x)[1].sum()).sum()))
    assert lowered(scanned, ((3, 512, 256), "bfloat16")).count("triton_kernel_call") == 1
    assert lowered(mapped, ((64, 256, 16), "bfloat16")).count("triton_kernel_call") == 1
    assert lowered(sharded, ((512, 256), "bfloat16")).count("triton_kernel_call") == 1
    assert lowered(unchecked, ((512, 256), "bfloat16")).count("triton_kernel_call") == 1
    assert "triton_kernel_call" in lowered(remat, ((512, 256), "bfloat16"))


@pytest.mark.usefixtures("kernels")
def test_what_is_made_of_operations_runs_their_kernels_on_a_gpu():
    x, index = ((512, 256), "bfloat16"), ((4,), "int32")
    separated = lambda x, index: jk.quantize_separated(x, index, **HOW)
    channelwise = lambda x: jk.quantize_channelwise(x, **HOW)
    assert lowered(separated, x, index).count("triton_kernel_call") == 1
    assert lowered(channelwise, x).count("triton_kernel_call") == 1
    with jk.references():
        assert "triton_kernel_call" not in lowered(channelwise, x)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", ["bool", "int32", "bfloat16"])
def test_masks_go_to_the_reference_on_a_gpu(dtype):
    zero, one = (jnp.asarray(n, dtype) for n in (0, 1))
    there = lambda x: jk.pack_bits(x, zero, group=256)
    back = lambda codes: jk.unpack_bits(codes, zero, one, width=1024)
    assert "triton_kernel_call" not in lowered(there, ((512, 1024), dtype))
    assert "triton_kernel_call" not in lowered(back, ((512, 4, 32), "uint8"))


@pytest.mark.usefixtures("kernels")
@pytest.mark.jax_defaults
def test_a_tensor_of_more_values_than_int32_counts_gets_a_kernel():
    quantize = lambda x: jk.quantize(x, **HOW)
    assert lowered(quantize, ((2**19, 4096), "bfloat16")).count("triton_kernel_call") == 1


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    ("shape", "dtype", "group"),
    [
        ((512, 256), "float64", 64),  # Triton's arithmetic here is float32's
        ((512, 256), "bfloat16", 6),
        ((512, 256), "bfloat16", 8),
        ((512, 252), "bfloat16", 64),  # rows whose last group is short
        ((16, 256), "bfloat16", 64),  # too few values
        ((2**20,), "bfloat16", 2**14),
    ],
)
def test_what_no_kernel_takes_goes_to_the_reference(shape, dtype, group):
    assert not choice.encodes(jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)), group=group)
    text = lowered(lambda x: jk.quantize(x, **HOW | {"group": group}), (shape, dtype))
    assert "triton_kernel_call" not in text


@pytest.mark.usefixtures("kernels")
def test_a_missing_jax_triton_is_told_once(monkeypatch):
    monkeypatch.setitem(sys.modules, "jax_triton", None)
    quantize = lambda x: jk.quantize(x, **HOW)
    with pytest.warns(UserWarning, match=r"kernels are not used: .*pip install 'jaxmem\[gpu\]'"):
        assert "triton_kernel_call" not in lowered(quantize, ((512, 256), "bfloat16"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lowered(quantize, ((1024, 256), "bfloat16"))
    adapter.is_there.cache_clear()


def test_what_kernels_are_written_in_is_not_imported_for_a_cpu():
    program = (
        "import sys, jax, jax.numpy as jnp, jaxmem, jaxmem_kernels as jk\n"
        "jax.jit(lambda x: jk.quantize(x, group=64, scale='bfloat16',"
        " stochastic=False))(jnp.ones((512, 256)))\n"
        "written_in = {'triton', 'jax_triton', 'jax.experimental.pallas', 'jaxmem_kernels.tpu'}\n"
        "assert not written_in & set(sys.modules)"
    )
    children.python("-c", program)


X, CODES = jnp.ones((4, 128), jnp.float32), jnp.zeros((4, 2, 32), jnp.uint8)
INDEX, TAKEN = jnp.zeros((2, 2), jnp.int32), jnp.zeros(100, bool)
ODD, BACK = HOW | {"group": 7}, {"width": 128, "dtype": "float32"}
BY = {"group": 64, "stochastic": False}


@refused(
    (TypeError, ValueError),
    ("quantize", [X > 0], HOW, r"quantize: `x` is bool \(4, 128\).*: pack_bits takes bool"),
    ("quantize_by", [X.astype(jnp.int32), X[0]], BY, "`x` is int32"),
    ("quantize", [X[0, 0]], HOW, r"`x` has no axis; .* reshape it to \(1,\)"),
    ("quantize_offset", [X], ODD, "quantize_offset: `group` is 7; expected a multiple of 2"),
    ("pack_bits", [X > 0, False], {"group": 12}, "`group` is 12; expected a multiple of 8"),
    ("dequantize", [CODES, X], BACK | {"width": 200}, "`width` is 200, .* expected 4 groups"),
    ("dequantize", [X, X], BACK, r"`packed` is float32 \(4, 128\); expected uint8"),
    ("quantize_channelwise", [X], ODD, "quantize_channelwise: `group` is 7; expected a multi"),
    ("quantize_separated", [X, INDEX], HOW, r"`index` is int32 \(2, 2\).* int32 \(slots,\)"),
    ("quantize_without", [X, TAKEN], HOW, "`taken` is of 100 channels, .* of 128 values"),
)
def test_what_an_operation_cannot_take(op, arrays, how):
    getattr(jk, op)(*arrays, **how)


@pytest.mark.usefixtures("kernels")
def test_what_is_lowered_again_for_another_gpu_or_without_kernels_is_not_taken_from_a_cache():
    traced = jax.jit(lambda x: jk.quantize(x, **HOW)).trace(
        jax.ShapeDtypeStruct((512, 256), "bfloat16")
    )
    text = lambda: traced.lower(lowering_platforms=("cuda",)).as_text()
    with jk.compiling_for(90):
        hopper = text()
        with jk.references():
            assert "triton_kernel_call" not in text()
    with jk.compiling_for(80):
        assert text() != hopper
    with jk.compiling_for(90):
        assert text() == hopper
    assert "triton_kernel_call" not in text(), "nobody says for which GPU"


def test_an_exported_program_runs_anywhere():
    function = jax.jit(lambda x: jk.quantize(x, **HOW))
    rows = jax.export.symbolic_shape("b")[0]
    for shape in ((512, 256), (rows, 256)):
        exported = jax.export.export(function, platforms=["cuda", "cpu"])(
            jax.ShapeDtypeStruct(shape, "bfloat16")
        )
        x = jax.random.normal(jax.random.key(0), (512, 256), jnp.bfloat16)
        for got, want in zip(jax.export.deserialize(exported.serialize()).call(x), function(x)):
            assert (got == want).all()


def test_without_jit_and_under_a_mesh_and_without_one_again():
    x = jax.random.normal(jax.random.key(0), (512, 256), jnp.float32)
    quantize = lambda x: jk.quantize(x, **HOW)
    want = jax.jit(quantize)(x)
    with jax.disable_jit():
        assert (quantize(x)[0] == want[0]).all()
    with jax.set_mesh(jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))):
        jax.jit(quantize)(x)
    assert (jax.jit(lambda x: quantize(x))(x)[0] == want[0]).all()
    assert pickle.loads(pickle.dumps(jk.quantize)) is jk.quantize
