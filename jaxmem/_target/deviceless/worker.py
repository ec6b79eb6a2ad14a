"""The compiling process: reads exported steps from stdin, compiles each for a device that is
not there, answers on stdout.

Run by `compiler.py` as `python -m jaxmem._target.deviceless.worker`, with `JAX_PLATFORMS=cpu`.
"""

import os
import queue
import sys
import threading
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxmem._target.deviceless import gpu, tpu
from jaxmem._target.deviceless.wire import read_message, write_message
from jaxmem._trace.arguments import on_host

KINDS: dict[str, Any] = {"cuda": gpu, "tpu": tpu}


def deviceless_mesh(devices: list[Any], exported: jax.export.Exported) -> Mesh:
    """Returns the mesh that `exported` was sharded over, made of `devices`; a mesh of as many
    devices as it runs on where no argument was sharded.
    """
    no_mesh: Any = None  # shardings then keep the mesh that they were exported with
    named = [s for s in exported.in_shardings_jax(no_mesh) if isinstance(s, NamedSharding)]
    # An argument on a single device has a mesh without axes; others may have a mesh with axes.
    like = next((s.mesh for s in named if s.mesh.axis_names), None)
    if like is None:
        return Mesh(np.array(devices[: exported.nr_devices]), ("data",))
    return Mesh(
        np.array(devices).reshape(like.axis_sizes), like.axis_names, axis_types=like.axis_types
    )


def compile_exported(devices: list[Any], exported_bytes: bytes, header: dict) -> dict[str, Any]:
    """Compiles a step, and returns the answer to a request.

    devices: the target's devices.
    exported_bytes: the step, as `export_flat` made it.
    header: the request, as `Compiler` writes it; see `Compiler.submit` for its options.

    The answer holds the fields of `Compiled`, and the fields of `Peak` if `header` requests them.
    """
    exported = jax.export.deserialize(bytearray(exported_bytes))
    if exported.nr_devices not in (1, len(devices)):
        raise ValueError(
            f"the step is sharded over {exported.nr_devices} devices, but the target has"
            f" {len(devices)}; expected a mesh of as many devices as the target, or a target of"
            f" {exported.nr_devices}, such as 'h200:{exported.nr_devices}'"
        )
    kind, mesh = KINDS[header["device"]["platform"]], deviceless_mesh(devices, exported)
    call = tpu.with_stop(exported.call) if header.get("assigned") else exported.call
    step = jax.jit(call, donate_argnums=tuple(header["donated"]))
    lowered = step.trace(*_arguments(exported, mesh, header.get("free", False))).lower()
    return (kind.explained if header.get("explain") else kind.compiled)(lowered, header)


def _arguments(exported: jax.export.Exported, mesh: Mesh, free: bool) -> list[jax.ShapeDtypeStruct]:
    """The step's arguments on `mesh`; those without a sharding are whole on every device, or
    divided as XLA likes where they are `free`.
    """
    no_mesh: Any = None  # shardings then keep the mesh that they were exported with

    def one(aval, exported_sharding) -> jax.ShapeDtypeStruct:
        named = isinstance(exported_sharding, NamedSharding) and exported_sharding.mesh.axis_names
        if free and not named:
            return jax.ShapeDtypeStruct(aval.shape, aval.dtype)
        spec = exported_sharding.spec if named else PartitionSpec()
        sharding = NamedSharding(mesh, spec)
        # Devices that are not there list no memories, so that a sharding on them drops the kind of
        # memory in silence: an argument in host memory is on the mesh without its devices.
        if on_host(aval):
            sharding = NamedSharding(mesh.abstract_mesh, spec, memory_kind="pinned_host")
        return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding)

    return [*map(one, exported.in_avals, exported.in_shardings_jax(no_mesh))]


def main() -> None:
    """Answers requests until the parent closes the pipe."""
    # Answers go to a copy of stdout, and stdout itself becomes stderr: whatever a library prints
    # must not end up among the answers.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    requests: queue.Queue = queue.Queue()
    # A thread of its own reads stdin, so that the parent's end is noticed during a compile too.
    threading.Thread(target=_listen, args=(requests,), daemon=True).start()
    devices: list[Any] = []
    while True:
        header, payload = requests.get()
        try:
            if not devices:  # all requests of one process are for one target
                devices = KINDS[header["device"]["platform"]].devices(header["device"])
            answer = compile_exported(devices, payload, header)
        except Exception as error:  # it fails this step, and the process goes on with the next
            answer = {"error": f"{type(error).__name__}: {error}"}
        write_message(answers, answer)


def _listen(requests: queue.Queue) -> None:
    """Passes requests on; ends the process with its parent, be it in the middle of a compile."""
    while (message := read_message(sys.stdin.buffer)) is not None:
        requests.put(message)
    os._exit(0)


if __name__ == "__main__":
    main()
