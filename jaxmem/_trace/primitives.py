"""Names of JAX's primitives, in lists by their meaning for jaxmem."""

# They run a jaxpr of their own, once. The equations inside belong to the caller.
# Remove with JAX 0.10: "closed_call", which JAX 0.11 does not have.
CALLS = frozenset({"jit", "closed_call", "remat2", "custom_jvp_call", "custom_vjp_call"})
# Calls that bring a derivative of their own.
RULES = frozenset({"custom_jvp_call", "custom_vjp_call"})
# They give a value a name: `checkpoint_name`'s, and `jaxmem.tag`'s.
TAGS = frozenset({"name", "jaxmem_tag"})
# `jax.checkpoint`.
REMAT = frozenset({"remat2"})
# They make no new numbers: XLA reads their operand where it lies, or copies it.
VIEWS = frozenset({
    "slice", "squeeze", "reshape", "transpose", "convert_element_type", "copy", "broadcast_in_dim",
    "dynamic_slice", "device_put", "sharding_constraint", "optimization_barrier",
    "random_wrap", "random_unwrap", "pvary",
})  # fmt: skip
# What counts layers, and makes their keys.
INDICES = frozenset({"iota", "add", "lt", "select_n", "random_fold_in"})
# Of a layer's own parameters these are cheaper to repeat than to save, and saving would copy the
# parameters of every layer.
REPEATED = frozenset({
    "convert_element_type", "reshape", "squeeze", "broadcast_in_dim", "transpose",
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
    "copy", "sharding_constraint", "reduce_precision",
})  # fmt: skip
# Too expensive to repeat with a matrix product: loops, kernels, sorts and searches.
COSTLY = frozenset({
    "dot_general", "conv_general_dilated", "ragged_dot_general", "pallas_call",
    "custom_vjp_call", "ffi_call", "triton_kernel_call", "sort", "top_k", "fft", "cholesky",
    "triangular_solve", "scatter-add", "cumsum", "cumlogsumexp", "reduce_window",
    "reduce_window_sum", "reduce_window_max", "scan", "while",
})  # fmt: skip
# Random bits, the source of masks.
RANDOM = frozenset({"random_bits", "random_gamma", "threefry2x32", "rng_bit_generator"})
# XLA gives the result its operand's memory: it is the same numbers under another shape or name.
RENAMED = frozenset({
    "reshape", "squeeze", "transpose", "copy", "optimization_barrier",
    "sharding_constraint", "random_wrap", "random_unwrap", "pvary", "reduce_precision", "name",
    "jaxmem_tag", "jaxmem_differentiable_once",
})  # fmt: skip
# XLA runs them in the kernel that reads their result, which is then written nowhere.
POINTWISE = frozenset({
    "add", "sub", "mul", "div", "rem", "max", "min", "neg", "sign", "abs", "floor", "ceil", "round",
    "eq", "ne", "lt", "le", "gt", "ge", "and", "or", "not", "xor", "is_finite", "nextafter",
    "shift_left", "shift_right_logical", "shift_right_arithmetic", "population_count", "clz",
    "integer_pow", "square", "one_minus_square", "clamp", "select_n", "add_any", "real", "imag",
    "complex", "conj", "iota", "broadcast_in_dim", "concatenate", "pad", "slice", "dynamic_slice",
    "gather", "rev", "split", "convert_element_type", "bitcast_convert_type", "random_seed",
    "random_fold_in", "random_split",
})  # fmt: skip
# Pointwise operations that are too expensive to be run by each of several kernels.
POINTWISE_DEAR = frozenset({
    "exp", "exp2", "expm1", "log", "log1p", "tanh", "logistic", "erf", "erfc", "erf_inv", "pow",
    "rsqrt", "sqrt", "cbrt", "sin", "cos", "tan", "atan2", "random_bits", "threefry2x32",
})  # fmt: skip
# They end a kernel, and fuse with what makes their operand.
REDUCTIONS = frozenset({
    "reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "argmax",
    "argmin", "reduce",
})  # fmt: skip
# They write into their operand's memory, where nothing else reads that.
IN_PLACE = frozenset({
    "scan", "while", "dynamic_update_slice", "scatter", "scatter-add",
    "psum", "psum_invariant",
})  # fmt: skip
