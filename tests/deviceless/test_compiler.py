import os
import pathlib
import signal
import site
import subprocess
import sys
import time
from importlib import metadata

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

import jaxmem
from jaxmem._target.compiled.compiled import read_compiled
from jaxmem._target.deviceless import wheels
from jaxmem._target.deviceless.compiler import Compiler
from jaxmem._target.deviceless.process import child_environment
from jaxmem._target.deviceless.wheels import install_command, require_wheels
from jaxmem._target.devices.chips import GPUS
from jaxmem._target.devices.target import Target
from jaxmem.errors import StepError, TargetError
from tests.shared import children
from tests.shared.children import alive
from tests.shared.deviceless import D, M, result, spec, submit


def stack_loss(weights_LDD, x_MD):
    y_MD, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x_MD, weights_LDD)
    return (y_MD.astype(jnp.float32) ** 2).mean()


def stack_step(weights_LDD, x_MD):
    return jax.tree.map(lambda w, g: w - g, weights_LDD, jax.grad(stack_loss)(weights_LDD, x_MD))


def test_bytes_add_up_and_donation_aliases(h200):
    args = spec(4, D, D), spec(M, D)
    plain, donated = result(h200, stack_step, *args), result(h200, stack_step, *args, donate=0)
    weights, x = 4 * 4 * D * D, 4 * M * D
    sizes = plain.argument_bytes, plain.output_bytes, plain.alias_bytes
    assert sizes == (weights + x, weights, 0)
    assert donated.alias_bytes == weights
    for c in (plain, donated):
        assert c.total_bytes == c.temp_bytes + c.argument_bytes + c.output_bytes - c.alias_bytes
        assert c.temp_bytes >= 4 * x
        assert c.host_bytes == 0
        assert c.compile_seconds > 0
        assert c.xla_seconds > 0


def test_offload_in_a_scan_uses_host_memory(h200):
    def body(x, w):
        return jnp.tanh(checkpoint_name(x, "in") @ w), None

    def loss(weights, x):
        policy = jax.checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=["in"],
            offload_src="device",
            offload_dst="pinned_host",
        )
        block = jax.checkpoint(body, policy=policy, prevent_cse=False)
        return (jax.lax.scan(block, x, weights)[0] ** 2).mean()

    compiled = result(h200, jax.grad(loss), spec(8, D, D), spec(1024, D))
    assert compiled.host_bytes == 8 * 4 * 1024 * D


def test_a_step_that_xla_refuses_is_a_step_error(h200):
    def refused(x):
        return jax.ffi.ffi_call("no_such_kernel", jax.ShapeDtypeStruct(x.shape, x.dtype))(x)

    exporting = jax.export.DisabledSafetyCheck.custom_call("no_such_kernel")
    exported = jax.export.export(jax.jit(refused), platforms=["cuda"], disabled_checks=[exporting])(
        spec(8)
    )
    with pytest.raises(StepError, match="XLA could not compile the step for `target` 'h200'"):
        h200.submit(bytes(exported.serialize())).result(timeout=120)
    with pytest.raises(StepError, match="could not compile"):
        h200.submit(b"these are no exported bytes").result(timeout=120)
    assert result(h200, jnp.tanh, spec(8)).argument_bytes == 32


def test_xla_options_are_passed_on(h200):
    with pytest.raises(StepError, match="no_such_option"):
        result(h200, jnp.tanh, spec(8), options={"no_such_option": True})


@pytest.mark.parametrize(
    ("dtype", "result_dtype"),
    [("bfloat16", "bfloat16"), ("bfloat16", "float32"), ("float16", "float16")],
)
def test_estimates_of_16_bit_products_are_within_the_peak(h200, dtype, result_dtype):
    size = spec(4096, 4096, dtype=jnp.dtype(dtype))
    dot = lambda x, y: jax.lax.dot(x, y, preferred_element_type=result_dtype)
    compiled = result(h200, dot, size, size)
    assert 0.5 * 989e12 < compiled.matmul_flops / compiled.xla_seconds < 989e12


@pytest.mark.quick("b200")
@pytest.mark.parametrize("name", GPUS)
def test_every_gpu_of_the_table_compiles(name):
    with Compiler(name, workers=1) as compiler:
        compiled = result(compiler, stack_step, spec(2, D, D), spec(M, D))
    assert compiled.matmuls == 6
    assert (compiled.xla_seconds is not None) == GPUS[name].has_xla_estimates


def test_a_killed_process_fails_its_step_and_the_next_starts_another(own_processes):
    with Compiler("h200", workers=1) as compiler:
        assert result(compiler, jnp.tanh, spec(8)).argument_bytes == 32
        (child,) = compiler._children
        os.kill(child.pid, signal.SIGKILL)
        with pytest.raises(TargetError, match="was ended by SIGKILL"):
            result(compiler, jnp.tanh, spec(8))
        assert result(compiler, jnp.tanh, spec(16)).argument_bytes == 64


def test_a_compiler_that_aborts_refuses_its_step(own_processes, monkeypatch, tmp_path):
    program = tmp_path / "python"
    program.write_text(
        "#!/bin/sh\necho 'F1201 10:00:00.1 1 x.cc:1] Check failed' >&2\nkill -6 $$\n"
    )
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    said = "was ended by SIGABRT.*\n.*Check failed"
    with Compiler("h200", workers=1) as compiler, pytest.raises(StepError, match=said):
        compiler.submit(b"").result()


def test_leaving_ends_the_processes_and_the_compiles(own_processes):
    with Compiler("h200", workers=1) as compiler:
        first = submit(compiler, stack_step, spec(2, D, D), spec(M, D))
        waiting = submit(compiler, stack_step, spec(3, D, D), spec(M, D))
        until = time.monotonic() + 30
        while not compiler._children and time.monotonic() < until:
            time.sleep(0.01)
        (child,) = compiler._children
    assert waiting.cancelled()
    assert isinstance(first.exception(timeout=10), TargetError)
    assert not alive(child.pid)


def test_a_parent_that_dies_takes_its_processes_along():
    script = """
import os, time
from jaxmem._target.deviceless.compiler import Compiler
compiler = Compiler("h200", workers=1)
compiler.submit(b"nothing").exception()
print(next(iter(compiler._children)).pid, flush=True)
time.sleep(60)
"""
    parent = subprocess.Popen(
        [sys.executable, "-c", script],
        env=parent_environment(JAX_PLATFORMS="cpu"),
        stdout=subprocess.PIPE,
        text=True,
    )
    pid = int(parent.stdout.readline())
    assert alive(pid)
    parent.kill()
    parent.communicate()
    until = time.monotonic() + 10
    while alive(pid) and time.monotonic() < until:
        time.sleep(0.05)
    assert not alive(pid)


def parent_environment(**changes):
    environment = child_environment(os.environ)
    return {
        k: v for k, v in environment.items() if k not in ("JAX_PLATFORMS", "XLA_FLAGS")
    } | changes


CUDA = "--xla_gpu_cuda_data_dir=/cuda"
# Environment variables: the value in the user's process, and the value in a compiling process. A
# compiling process gets no variables of a TPU's machine, and of the XLA flags only CUDA's folder.
PASSED = {
    "TPU_CHIPS_PER_HOST_BOUNDS": ("2,2,1", None),
    "TPU_WORKER_HOSTNAMES": ("10.0.0.1,10.0.0.2", "localhost"),
    "MEGASCALE_NUM_SLICES": ("2", None),
    "TPU_LIBRARY_PATH": ("/opt/libtpu.so", "/opt/libtpu.so"),
    "LIBTPU_INIT_ARGS": ("--a=1", "--a=1"),
    "XLA_FLAGS": (f"{CUDA} --xla_force_host_platform_device_count=8", CUDA),
    "JAX_PLATFORMS": ("cuda", "cpu"),
    "HOME": ("/home", "/home"),
}


def test_what_is_passed_on_to_a_compiling_process():
    given = {name: value for name, (value, _) in PASSED.items()}
    passed = child_environment(given | {"PYTHONPATH": "/mine"})
    assert {name: passed.get(name) for name in PASSED} == {n: b for n, (_, b) in PASSED.items()}
    assert passed["PYTHONPATH"].split(os.pathsep)[-1] == "/mine"


def test_the_folder_of_installed_packages_does_not_come_before_pythons_own_modules(monkeypatch):
    folder = str(pathlib.Path(jaxmem.__path__[0]).absolute().parent)
    monkeypatch.setattr(site, "getsitepackages", list)
    assert child_environment({})["PYTHONPATH"].split(os.pathsep)[0] == folder
    monkeypatch.setattr(site, "getsitepackages", lambda: [folder])
    assert folder not in child_environment({})["PYTHONPATH"].split(os.pathsep)


def test_the_plugins_complaint_about_a_missing_driver_is_dropped():
    script = (
        "from jaxmem._core.quiet import quiet_plugin_noise as q; q(); import jax;"
        " print(jax.devices()[0].platform)"
    )
    run = children.python("-c", script, environment=parent_environment())
    assert run.stderr == ""
    assert run.stdout.strip() == jax.devices()[0].platform


def test_missing_or_other_wheels_name_the_command(monkeypatch):
    version = metadata.version("jax")
    command = install_command(f"jax-cuda13-plugin=={version}", f"jax-cuda13-pjrt=={version}")
    found = dict.fromkeys(("jax", "jaxlib", "jax-cuda13-plugin"), version)
    found["jax-cuda13-pjrt"] = None
    monkeypatch.setattr(wheels, "installed", found.get)
    with pytest.raises(TargetError, match="jax-cuda13-pjrt missing") as error:
        Compiler("h200")
    assert command in str(error.value)
    assert "jaxmem[deviceless]" in str(error.value)
    found |= {"jax-cuda13-pjrt": version, "jax-cuda13-plugin": "0.1.2"}
    with pytest.raises(TargetError, match=r"must be of jax's own version.*jax-cuda13-plugin 0.1.2"):
        require_wheels(Target.parse("h200"))
    found["jax-cuda13-plugin"] = version
    require_wheels(Target.parse("h200"))


def test_a_missing_assembler_names_the_wheels(h200):
    for message in (
        "UNAVAILABLE: No PTX compilation provider is available. ",
        "INTERNAL: libdevice not found at ./libdevice.10.bc",
    ):
        error = h200._error(f"JaxRuntimeError: {message}")
        assert isinstance(error, TargetError)
        assert "pip install --no-deps nvidia-cuda-nvcc nvidia-nvvm" in str(error)


def test_local_is_not_compiled_for_here():
    with pytest.raises(TargetError, match="only a named GPU or TPU is compiled for"):
        Compiler("local")


def test_local_compiles_read_the_same():
    compiled = jax.jit(stack_step, donate_argnums=0).lower(spec(4, D, D), spec(M, D)).compile()
    read = read_compiled(compiled, seconds=1.5)
    assert (read.matmuls, read.matmul_flops) == (12, 12 * 2 * M * D * D)
    assert read.alias_bytes == 4 * 4 * D * D
    assert (read.xla_seconds, read.compile_seconds, read.host_bytes) == (None, 1.5, 0)
    assert (
        read.total_bytes
        == read.temp_bytes + read.argument_bytes + read.output_bytes - read.alias_bytes
    )
