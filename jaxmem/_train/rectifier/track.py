"""Counts the outlier channels of a step's tensors while a model trains (Adacc 3.2, 3.4).

A separate program counts. The model is unchanged, and steps without a count cost nothing.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxmem._model.codecs.outlier import THRESHOLD, z_scores
from jaxmem._model.states.places import HOST
from jaxmem._model.tags.implementation import todays_checkpoint
from jaxmem._trace.arguments import shard_bytes
from jaxmem._trace.filtered import is_array
from jaxmem._trace.step import trace
from jaxmem._train.rectifier.counts import Counts, Outliers, counted, greatest
from jaxmem._train.rectifier.mark import Marking, reaped
from jaxmem.errors import StepError

RECENT = 2  # counted steps for whose counts codecs get capacity


class Tracker:
    """Counts outlier channels. `tracker(state, batch)` starts a program that runs the step's
    forward, and returns the Z-scores of its tensors. `read` counts the outliers.

    bytes: bytes on a device while the program runs, with all arguments of the step. Known after
      `compile`.
    """

    def __init__(self, build: Callable, args: tuple, codecs: Any = None):
        """Traces the step that `build` returns.

        build, args, codecs: the arguments of `jaxmem.plan`. Shapes are enough for `args`.

        Raises StepError if the step has no tensor to count.
        """
        with todays_checkpoint():
            _, traced = trace(build, Marking(codecs), args)
        self._closed = traced.jaxpr
        self._names: list[tuple[str, str]] = []
        self._compiled: Any = None
        self.bytes = 0
        measured = reaped(self._closed, z_scores)

        def program(*arrays):
            found = measured(*arrays)
            self._names = [name for name, _ in found]
            return [x for _, x in found]

        self._program = jax.jit(program)
        jax.eval_shape(program, *(_shape(v.aval) for v in self._closed.jaxpr.invars))
        if not self._names:
            raise StepError(
                "track: the step has no tensor to track: expected tags whose codec separates"
                " outliers, as that of linear, norm, gelu and residual ones does, in blocks that"
                " are differentiated, outside while loops and shard_map"
            )

    def compile(self, *args) -> None:
        """Compiles the program for arguments with the placement of `args`."""
        arrays = self._arrays(args)
        self._compiled = self._program.lower(*arrays).compile()
        memory: Any = self._compiled.memory_analysis()
        beside = memory.temp_size_in_bytes + memory.output_size_in_bytes
        # Arguments that the program does not read are in memory too.
        on_device = (
            a for a in arrays if isinstance(a, jax.Array) and a.sharding.memory_kind != HOST
        )
        self.bytes = beside + sum(map(shard_bytes, on_device))

    def __call__(self, *args) -> list[jax.Array]:
        """Starts to compute the Z-scores, which `read` waits for. Arguments are not donated."""
        if self._compiled is None:
            self.compile(*args)
        program: Any = self._compiled
        return program(*self._arrays(args))

    def read(self, step: int, scores: list[jax.Array]) -> list[Outliers]:
        """Counts the outliers of each tag at a step, from the scores that a call returned."""
        of: dict[tuple[str, str, int], list[np.ndarray]] = {}
        for name, z in zip(self._names, scores):
            of.setdefault((*name, z.shape[-1]), []).append(np.asarray(z))
        return [outliers_of(step, *name[:2], arrays) for name, arrays in of.items()]

    def _arrays(self, args: tuple) -> list:
        """The arguments in the form that the traced step takes. Raises StepError for other
        arguments.
        """
        arrays = [a for a in jax.tree.leaves(args) if is_array(a) or np.isscalar(a)]
        wanted = [v.aval for v in self._closed.jaxpr.invars]
        if [np.shape(a) for a in arrays] != [aval.shape for aval in wanted]:
            arrays = [a for a in arrays if is_array(a)]
        if [np.shape(a) for a in arrays] != [aval.shape for aval in wanted]:
            raise StepError(
                f"track: the arguments have {len(arrays)} arrays where the step was traced for"
                f" {len(wanted)}, or other shapes; expected those that it was traced for"
            )
        return arrays


def _shape(aval) -> jax.ShapeDtypeStruct:
    """The abstract value of an argument for a trace; on an explicit mesh with its sharding."""
    sharding = getattr(aval, "sharding", None)
    known = sharding is not None and not sharding.mesh.empty
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding if known else None)


def outliers_of(step: int, block: str, tag: str, scores: Sequence[np.ndarray]) -> Outliers:
    """Counts the outliers among the Z-scores of a tag's tensors. Each array has the shape (...,
    channels): one tensor, or the tensors of a loop's iterations.
    """
    rows = np.concatenate([z.reshape(math.prod(z.shape[:-1]), z.shape[-1]) for z in scores])
    beyond = rows > THRESHOLD
    return Outliers(
        step,
        block,
        tag,
        rows.shape[-1],
        tuple(int(n) for n in beyond.sum(-1)),
        tuple(float(z) for z in rows.max(-1, initial=-np.inf if rows.size else np.nan)),
        tuple(tuple(int(c) for c in np.flatnonzero(row)) for row in beyond),
    )


class Watch:
    """Counts outliers before steps 1, 2, 4 and so on, and later before every `every`-th step. After
    an error nothing is counted, and the training continues.

    build, args, codecs: the arguments of `jaxmem.plan`.
    recent: the counts of the latest counted steps.
    """

    def __init__(self, build: Callable, args: tuple, codecs: Any, every: int):
        self._given, self._every = (build, args, codecs), every
        self._tracker: Tracker | None = None
        self._scores: dict[int, list[jax.Array]] = {}  # by step; still computed on the device
        self._ended = False
        self.recent: list[Counts] = []

    @property
    def counts(self) -> dict[str, dict[str, int]]:
        """The greatest count of each tag in the latest counted steps."""
        return greatest(self.recent)

    def look(self, number: int, args: tuple, room: int | None) -> str | None:
        """Starts to count the outliers of a step that is about to run, if a count is due. Returns
        the error, once, if counting failed.

        room: bytes of device memory that counting may use, or None.
        """
        early = number & (number - 1) == 0 and number < self._every  # at powers of two
        if self._ended or not (early or number % self._every == 0):
            return None
        try:
            if self._tracker is None:
                self._tracker = Tracker(*self._given)
                self._tracker.compile(*args)
                if room is not None and self._tracker.bytes > room:
                    raise StepError(
                        f"track: counting takes {self._tracker.bytes:,} bytes of a budget of"
                        f" {room:,}"
                    )
            self._scores[number] = self._tracker(*args)
        except Exception as error:  # no error of counting ends the training
            return self._end(error)
        return None

    def seen(self, number: int) -> tuple[list[Outliers], str | None]:
        """The counts that were started before step `number`, or none, and the error if reading them
        failed.
        """
        scores = self._scores.pop(number, None)
        if scores is None or self._tracker is None:
            return [], None
        try:
            found = self._tracker.read(number, scores)
        except Exception as error:
            return [], self._end(error)
        self.recent = [*self.recent, counted(found)][-RECENT:]
        return found, None

    def _end(self, error: Exception) -> str:
        """Ends counting, and returns the reason in words."""
        self._ended = True
        self._scores.clear()
        return said(error)


def said(error: BaseException) -> str:
    """An error as one line of text."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:300]}" if text else type(error).__name__
