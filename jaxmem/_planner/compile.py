"""Compiles a step under given actions for the target, here or in a child process, and reads its
bytes.

What a deviceless compile said is remembered by the program's own text, so that planning again costs
no compile.
"""

import concurrent.futures
import dataclasses
import re
import time
from typing import Any

import jax
from jax import export

from jaxmem._core.actions import Actions
from jaxmem._core.database import Database
from jaxmem._device.target import Target
from jaxmem._jax.export import export_flat
from jaxmem._jax.step import trace
from jaxmem._plan.plan import Draft
from jaxmem._xla.compiled import Compiled, read_compiled


@dataclasses.dataclass(frozen=True)
class Verified:
    """A step that was compiled: its actions, its bytes, and the executable where the target is this
    device.
    """

    actions: Actions
    compiled: Compiled
    executable: Any = None


def _program_text(exported: bytes, donated: tuple[int, ...]) -> bytes:
    """What decides a compile's result: the program, without where in the source it was written."""
    text = export.deserialize(bytearray(exported)).mlir_module()
    text = re.sub(r'loc\((#loc\d*|"[^"]*")\)|^#loc.*\n', "", text, flags=re.MULTILINE)
    return f"{donated} {text}".encode()


class Verifier:
    """Compiles steps of one `build` for one target, and counts compiles and the seconds spent
    waiting for them.
    """

    def __init__(self, build, args: tuple, target: Target, compiler=None):
        self.build, self.args, self.target, self.compiler = build, args, target, compiler
        self.database = Database()
        self.compiles = 0
        self.seconds = 0.0

    def trace(self, plan) -> jax.stages.Traced:
        return trace(self.build, plan, self.args)[1]

    def compile(self, *many: Actions | None) -> list[Verified]:
        """Compiles the step under each of `many` actions (None: everything kept), side by side
        where the target allows.
        """
        start = time.perf_counter()
        futures = [self._submit(actions) for actions in many]
        results = [future.result() for future in futures]
        self.compiles += len(many)
        self.seconds += time.perf_counter() - start
        return results

    def _submit(self, actions: Actions | None) -> concurrent.futures.Future:
        stage, traced = trace(self.build, None if actions is None else Draft(actions), self.args)
        done: concurrent.futures.Future = concurrent.futures.Future()
        if self.compiler is None:
            start = time.perf_counter()
            executable = stage.lower().compile()
            inner = getattr(executable, "compiled", executable)  # nnx.jit wraps JAX's executable
            compiled = read_compiled(inner, cost=False, seconds=time.perf_counter() - start)
            done.set_result(Verified(actions or {}, compiled, executable))
            return done
        exported, donated = export_flat(
            traced, self.target.platform, self.target.compute_capability
        )
        program = _program_text(exported, donated)
        if (known := self.database.read_compile(str(self.target), program)) is not None:
            done.set_result(Verified(actions or {}, Compiled(**known)))
            return done

        def finish(future):
            if (error := future.exception()) is not None:
                done.set_exception(error)
                return
            self.database.write_compile(
                str(self.target), program, dataclasses.asdict(future.result())
            )
            done.set_result(Verified(actions or {}, future.result()))

        self.compiler.submit(exported, donated=donated).add_done_callback(finish)
        return done
