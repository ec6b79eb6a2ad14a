import jax
import jax.numpy as jnp
import pytest

from jaxmem._target.devices.rates import Rates
from jaxmem._target.hlo.costs import OF_ARITHMETIC, OF_BANDWIDTH, HloCosts, hlo_costs
from tests.shared.executed import executed

M, D, L = 16, 32, 5


def stack_loss(weights_LDD, x_MD):
    y_MD, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x_MD, weights_LDD)
    return (y_MD**2).mean()


def costs_of(function, *shapes):
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return hlo_costs(jax.jit(function).lower(*args).compile().as_text())


def test_what_runs_in_loops_is_counted_by_their_trips():
    def turned(x):
        inner = lambda x, _: (jnp.sort(x) @ x, None)
        outer = lambda x, _: (jax.lax.scan(inner, x, length=3)[0], None)
        return jnp.sort(jax.lax.scan(outer, x, length=L)[0])

    text = jax.jit(turned).lower(jnp.ones((M, M), jnp.float32)).compile().as_text()
    assert executed(text, ("sort", "all-reduce")) == {"sort": 3 * L + 1, "all-reduce": 0}


def test_gradient_is_three_products_a_layer():
    grad = jax.grad(stack_loss, argnums=(0, 1))
    assert costs_of(grad, (L, D, D), (M, D)) == HloCosts(3 * 2 * M * D * D * L, 3 * L, None)


def test_batched_and_multiply_contracted_products():
    attention = costs_of(
        lambda q, k: jax.nn.softmax(jnp.einsum("bhqd,bhkd->bhqk", q, k)),
        (2, 3, 16, 8),
        (2, 3, 24, 8),
    )
    assert attention == HloCosts(2 * 2 * 3 * 16 * 24 * 8, 1, None)
    merged = costs_of(
        lambda a, b: jnp.tanh(jnp.einsum("mhd,hdn->mn", a, b)), (16, 3, 8), (3, 8, 24)
    )
    assert merged == HloCosts(2 * 16 * 24 * 3 * 8, 1, None)


def test_conditional_counts_its_dearest_branch():
    def either(x, w):
        return jax.lax.cond(x.sum() > 0, lambda x: jnp.tanh(x @ w) @ w, lambda x: x @ w, x)

    assert costs_of(either, (M, D), (D, D)) == HloCosts(2 * 2 * M * D * D, 2, None)


def test_convolution_and_its_gradients():
    def conv(x, k):
        return jax.lax.conv_general_dilated(
            x, k, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    x, k, outputs = (2, 10, 10, 4), (3, 3, 4, 8), 2 * 8 * 8 * 8
    assert costs_of(conv, x, k) == HloCosts(2 * outputs * 3 * 3 * 4, 1, None)


def test_programs_without_products():
    assert costs_of(lambda x: jnp.tanh(x).sum(), (M, D)) == HloCosts(0, 0, None)


COST = '"reification_cost":[{"exec_time_us":%s,"name":""},{"exec_time_us":%s,"name":"sol"}]'
DIMENSIONS = (
    '"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"],'
    '"lhs_batch_dimensions":[]'
)
LIBRARY_CALLS = (
    """HloModule step

%sliced (p0: bf16[4,16,32], p1: s32[], p2: bf16[8,16]) -> (bf16[8,32], s8[64]) {
  %p2 = bf16[8,16]{1,0} parameter(2)
  %p0 = bf16[4,16,32]{2,1,0} parameter(0)
  %p1 = s32[] parameter(1)
  %slice = bf16[1,16,32]{2,1,0} dynamic-slice(%p0, %p1), dynamic_slice_sizes={1,16,32}
  %weight = bf16[16,32]{1,0} bitcast(%slice)
  ROOT %call = (bf16[8,32]{1,0}, s8[64]{0}) custom-call(%p2, %weight), CUBLAS, GEMM
}

%body (carry: (s32[], bf16[8,16], bf16[4,16,32])) -> (s32[], bf16[8,16], bf16[4,16,32]) {
  %carry = (s32[], bf16[8,16]{1,0}, /*index=2*/bf16[4,16,32]{2,1,0}) parameter(0)
  %i = s32[] get-tuple-element(%carry), index=0
  %x = bf16[8,16]{1,0} get-tuple-element(%carry), index=1
  %w = bf16[4,16,32]{2,1,0} get-tuple-element(%carry), index=2
  %product = (bf16[8,32]{1,0}, s8[64]{0}) fusion(%w, %i, /*index=2*/%x), calls=%sliced, ONE
  ROOT %next = (s32[], bf16[8,16]{1,0}, bf16[4,16,32]{2,1,0}) tuple(%i, %x, %w)
}

ENTRY %main (a: bf16[8,16], b: bf16[4,16,32], c: f32[2,8,6], d: f32[2,6,5]) -> f32[2,8,5] {
  %a = bf16[8,16]{1,0} parameter(0)
  %b = bf16[4,16,32]{2,1,0} parameter(1)
  %c = f32[2,8,6]{2,1,0} parameter(2)
  %d = f32[2,6,5]{2,1,0} parameter(3)
  %init = (s32[], bf16[8,16]{1,0}, bf16[4,16,32]{2,1,0}) tuple(%a, %b)
  %loop = (s32[], bf16[8,16]{1,0}, bf16[4,16,32]{2,1,0}) while(%init), body=%body, TRIPS
  %opaque = f32[8]{0} custom-call(%c), custom_call_target="__gpu$xla.gpu.triton"
  ROOT %last = f32[2,8,5]{2,1,0} custom-call(%c, %d), custom_call_target="__onednn$matmul", THREE
}
""".replace("GEMM", 'backend_config={"gemm":{DIMENSIONS},SOL7}')
    .replace("ONE", "backend_config={SOL1}")
    .replace("THREE", "backend_config={SOL3}")
    .replace("DIMENSIONS", DIMENSIONS)
    .replace("TRIPS", 'backend_config={"known_trip_count":{"n":"4"}}')
    .replace("CUBLAS", 'custom_call_target="__cublas$lt$matmul"')
)


def with_costs(text):
    for sol in (7, 1, 3):
        text = text.replace(f"SOL{sol}", COST % (99, sol))
    return text


def test_library_calls_and_their_estimates():
    flops = 4 * 2 * 8 * 32 * 16 + 2 * 2 * 8 * 5 * 6
    costs = hlo_costs(with_costs(LIBRARY_CALLS))
    assert (costs.matmul_flops, costs.matmuls) == (flops, 5)
    assert costs.seconds == pytest.approx(
        (4 * 7 + 3) * 1e-6
    )  # the call in the slicing fusion, not the fusion's own 1 µs


def test_unnamed_estimates_are_not_believed():
    only_unnamed = (
        LIBRARY_CALLS.replace("SOL7", COST.split(",{")[0] % 7 + "]")
        .replace("SOL1", '"a":1')
        .replace("SOL3", '"a":1')
    )
    assert hlo_costs(only_unnamed).seconds is None


def test_triton_fusions_use_the_model_made_for_them():
    named = LIBRARY_CALLS.replace(
        "SOL3",
        '"reification_cost":[{"exec_time_us":5,"name":"sol"},'
        '{"exec_time_us":2,"name":"indexing-cost-model"}]',
    )
    assert hlo_costs(named).seconds == pytest.approx(2e-6)


@pytest.mark.parametrize(
    ("dtypes", "seconds"), [("f16 f16", 9), ("bf16 f32", 9), ("bf16 bf16", 7), ("f32 f32", 7)]
)
def test_products_that_xla_misprices_are_priced_by_the_rates(dtypes, seconds):
    operand, output = dtypes.split()
    text = (
        with_costs(LIBRARY_CALLS)
        .replace("bf16", operand)
        .replace(f"({operand}[8,32]", f"({output}[8,32]")
    )
    flops = 2 * 8 * 32 * 16  # 3 µs of arithmetic, and 6 µs of every product
    rates = Rates(1e30, flops / 3e-6, 1e30, link=1e30, codec=1e30)
    assert hlo_costs(text, rates).seconds == pytest.approx((4 * seconds + 3) * 1e-6)
    moved = (8 * 16 + 16 * 32) * (4 if operand == "f32" else 2) + 8 * 32 * (
        4 if output == "f32" else 2
    )
    slow = Rates(moved / 0.9 / 3e-6, 1e30, 1e30, link=1e30, codec=1e30)
    assert hlo_costs(text, slow).seconds == pytest.approx((4 * seconds + 3) * 1e-6)


TRITON = """HloModule step

%inner (q0: bf16[8,16], q1: SUM[16,32]) -> bf16[8,32] {
  %q0 = bf16[8,16]{1,0} parameter(0)
  %q1 = SUM[16,32]{1,0} parameter(1)
  ROOT %dot = bf16[8,32]{1,0} dot(%q0, %q1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

ENTRY %main (a: bf16[8,16], b: SUM[16,32]) -> (bf16[8,32], f32[8]) {
  %a = SUM[8,16]{1,0} parameter(0)
  %b = SUM[16,32]{1,0} parameter(1)
  ROOT %f = (bf16[8,32]{1,0}, f32[8]{0}) fusion(%a, %b), kind=kCustom, calls=%inner, \
backend_config={"fusion_backend_config":{"kind":"KIND"},COST}
}
""".replace("COST", COST % (99, 5))


@pytest.mark.parametrize(
    "kind", ["__triton_gemm", "__triton_nested_gemm_fusion"], ids=["once", "nested"]
)
def test_products_in_tritons_fusions_are_priced_by_the_rates(kind):
    """XLA's estimates of them, here 5 µs, mean nothing before they are tuned."""
    flops, moved = 2 * 8 * 32 * 16, 2 * (8 * 16 + 16 * 32 + 8 * 32) + 4 * 8
    text = TRITON.replace("KIND", kind).replace("SUM", "bf16")
    seconds = lambda rates, text=text: hlo_costs(text, rates).seconds
    arithmetic = Rates(1e30, flops / 2e-6, 1e30, link=1e30, codec=1e30)
    assert seconds(arithmetic) == pytest.approx(8e-6)
    memory = Rates(moved / 0.9 / 4e-6, 1e30, 1e30, link=1e30, codec=1e30)
    assert seconds(memory) == pytest.approx(10e-6), "all that it reads, and both of its results"
    wide = TRITON.replace("KIND", kind).replace("SUM", "f32").replace("%q0 = bf16", "%q0 = f32")
    of_f32 = Rates(1e30, 1e30, flops / 2e-6, link=1e30, codec=1e30)
    assert seconds(of_f32, wide) == pytest.approx(8e-6)
    assert hlo_costs(text).seconds == pytest.approx(5e-6), "without rates, as XLA says"


def test_other_fusions_of_triton_have_xlas_estimate():
    rates = Rates(1e30, 1e30, 1e30, link=1e30, codec=1e30)
    text = TRITON.replace("KIND", "__triton").replace("SUM", "bf16")
    assert hlo_costs(text, rates).seconds == pytest.approx(5e-6)


KERNEL = """HloModule step

%inner (q: f32[1000]) -> f32[1000] {
  %q = f32[1000]{0} parameter(0)
  ROOT %s = f32[1000]{0} sine(%q)
}

ENTRY %main (a: f32[1000]) -> f32[1000] {
  %a = f32[1000]{0} parameter(0)
  ROOT %f = f32[1000]{0} fusion(%a), kind=kLoop, calls=%inner, backend_config={COST}
}
""".replace("COST", COST % (99, 5))


def test_kernels_that_are_no_products_take_what_a_gpu_took():
    """XLA's estimate is 5 µs; the kernel reads and writes 8000 bytes."""
    seconds = lambda nbytes: hlo_costs(KERNEL, Rates(nbytes / 1e-6, 1, 1, link=1, codec=1)).seconds
    assert hlo_costs(KERNEL).seconds == pytest.approx(5e-6), "without rates, as XLA says"
    assert seconds(8000 / 1) == pytest.approx(OF_ARITHMETIC * 5e-6), "memory traffic takes 1 µs"
    assert seconds(8000 / 4) == pytest.approx(5e-6 / OF_BANDWIDTH), "memory traffic takes 4 µs"
    assert seconds(8000 / 1.6) == pytest.approx(OF_ARITHMETIC * 5e-6)
