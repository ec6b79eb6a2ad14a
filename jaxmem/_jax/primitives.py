"""Names of JAX's primitives, by what they mean here: every list of them, side by side."""

# They run a jaxpr of their own, once: what is inside belongs to the caller.
CALLS = frozenset({
    "jit", "pjit", "closed_call", "core_call", "remat", "remat2", "checkpoint", "custom_jvp_call",
    "custom_vjp_call",
})  # fmt: skip
# Calls that bring a derivative of their own.
RULES = frozenset({"custom_jvp_call", "custom_vjp_call"})
# `jax.checkpoint` under its names over the years.
REMAT = frozenset({"remat", "remat2", "checkpoint"})
# They make no new numbers: XLA reads their operand where it lies, or copies it.
VIEWS = frozenset({
    "slice", "squeeze", "reshape", "transpose", "convert_element_type", "copy", "broadcast_in_dim",
    "dynamic_slice", "device_put", "sharding_constraint", "optimization_barrier", "expand_dims",
    "random_wrap", "random_unwrap", "pvary",
})  # fmt: skip
# What counts layers, and makes their keys.
INDICES = frozenset({"iota", "add", "lt", "select_n", "random_fold_in"})
# Of a layer's own parameters these are cheaper to repeat than to save, and saving would copy the
# parameters of every layer.
REPEATED = frozenset({
    "convert_element_type", "reshape", "squeeze", "expand_dims", "broadcast_in_dim", "transpose",
    "slice", "copy", "reduce_precision", "random_wrap", "random_unwrap", "pvary",
    "sharding_constraint",
})  # fmt: skip
# XLA names a buffer after the operation below these, which only reshape, convert or copy it.
RELABELLED = frozenset({
    "reshape", "transpose", "convert_element_type", "broadcast_in_dim", "squeeze", "copy",
    "reduce_precision",
})  # fmt: skip
# Each value of the result follows from one value of each operand.
POINTWISE_LINEAR = frozenset({
    "add", "sub", "mul", "div", "neg", "convert_element_type", "reshape", "transpose", "squeeze",
    "copy", "sharding_constraint", "reduce_precision", "expand_dims",
})  # fmt: skip
# What costs too much to repeat beside a matrix product: loops, kernels, sorts and searches.
COSTLY = frozenset({
    "dot_general", "conv_general_dilated", "ragged_dot", "ragged_dot_general", "pallas_call",
    "custom_vjp_call", "ffi_call", "triton_kernel_call", "sort", "top_k", "fft", "cholesky",
    "triangular_solve", "scatter-add", "scatter_add", "cumsum", "cumlogsumexp", "reduce_window",
    "reduce_window_sum", "reduce_window_max", "scan", "while",
})  # fmt: skip
# Random bits, of which masks are made.
RANDOM = frozenset({"random_bits", "random_gamma", "threefry2x32", "rng_bit_generator"})
