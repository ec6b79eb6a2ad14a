"""Plan: the frozen result of planning. `file.py` has its JSON form, and `text.py` its table."""

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from jaxmem._core import assignment
from jaxmem._core.actions import Actions, Choice, keeps_everything
from jaxmem._core.files import read_json, write_json
from jaxmem._core.groups import ranges
from jaxmem._model.states.places import Places
from jaxmem._result.plan import file, html, text
from jaxmem._result.plan.rows import Bytes, Measured, Point, Row, WrittenStep
from jaxmem._result.plan.timeline import Timeline
from jaxmem.errors import PlanFileError, StepError


@dataclasses.dataclass(frozen=True)
class Plan:
    """The actions for a step's tensors, with the step's bytes and times.

    `jaxmem.plan` makes a plan, and `Plan.load` reads a plan from a file.

    Bytes are for the whole step on one device: arguments + temporaries + outputs − aliased outputs.
    Times are seconds of one step.

    Attributes:
      actions: block label -> tag name -> choice. A group of layers with its own decisions has a
        label such as `block[0:6]`. Empty if the plan leaves a step with its own checkpoints as
        written.
      budget_bytes: the budget.
      predicted_bytes: bytes that were predicted before the step was compiled.
      compiled_bytes: bytes of the verified step, by XLA's memory analysis.
      baseline_bytes: bytes of the step with everything kept, without any checkpoint.
      host_bytes: bytes in host memory.
      predicted_seconds, baseline_seconds: seconds of the step under the plan, and with everything
        kept.
      uncertain_seconds: the uncertainty of the difference between these two times.
      baseline_source: the source of `baseline_seconds`: "measured" if jaxmem ran the step, "xla"
        for XLA's estimate of the compiled step, "pieces" for the sum of the times of pieces.
      profile_seconds, solve_seconds, compile_seconds: seconds that planning took to profile the
        step, to solve the program, and to compile.
      compiles: number of compiles.
      time_source: the source of the times of pieces: "measured", "xla" (XLA's estimates) or
        "roofline".
      target: the name of the target.
      fingerprint: a hash of the model's blocks, shapes, dtypes and tags. `jaxmem.verify` refuses a
        plan with another fingerprint than the model's.
      jax_version: the version of JAX that planned the step.
      parts, baseline_parts: bytes by use, under the plan and with everything kept.
      points: the curve that `pareto` returns.
      rows: the plan's table, with one row per tag.
      notes: sentences for the user, such as actions that were left out, and why.
      measured: the steps that ran for `measure=`, the plan's step among them.
      microbatches: the chosen number of microbatches. None if the plan did not choose a number.
      batch: the chosen size for the arguments that are functions of a size. None if the plan did
        not choose a size.
      places: the memories of the layers' model states. None if the plan does not place states.
      divided: the states that are divided over devices, as an argument of the released step's
        `data_parallel`: "nothing", "moments", "states" or "layers". None if the plan does not
        decide about the division.
      compiler_options: XLA's compile options of the step, for `jax.jit`. The options are set if
        loops of the step copy arrays between host memory and a GPU, or gather arrays between GPUs.
        Otherwise the dict is empty.
      lanes: the result of `timeline`. None if the plan does not place states, or is from an older
        jaxmem.
      as_written: whether the plan leaves the step as its author wrote it. `jaxmem.auto(step, plan)`
        is then `step`.
      written: the bytes and the time of the step as written, if the step has checkpoints of its
        own. Otherwise None.
      lossy: a sentence that names the tensors with a lossy codec, and the additional time of the
        best lossless plan. Empty if no tensor has a lossy codec.
    """

    actions: Actions
    budget_bytes: int
    predicted_bytes: int
    compiled_bytes: int
    baseline_bytes: int
    host_bytes: int
    predicted_seconds: float
    baseline_seconds: float
    profile_seconds: float
    solve_seconds: float
    compile_seconds: float
    compiles: int
    time_source: str
    target: str
    fingerprint: str
    jax_version: str
    parts: Bytes
    baseline_parts: Bytes
    points: tuple[Point, ...] = ()
    rows: tuple[Row, ...] = ()
    notes: tuple[str, ...] = ()
    microbatches: int | None = None
    batch: int | None = None
    uncertain_seconds: float = 0.0
    baseline_source: str = "pieces"
    measured: tuple[Measured, ...] = ()
    places: Places | None = None
    compiler_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    divided: str | None = None
    lanes: Timeline | None = None
    as_written: bool = False
    written: WrittenStep | None = None
    lossy: str = ""
    # the executable; it is not saved, and plans that differ in it alone are equal
    _step: Any = dataclasses.field(default=None, repr=False, compare=False)
    # move a state, and make one, where states are placed; likewise
    _split: Any = dataclasses.field(default=None, repr=False, compare=False)
    _create: Any = dataclasses.field(default=None, repr=False, compare=False)

    @property
    def step(self):
        """The compiled step, which is called like the step that `build` returns.

        Raises StepError if the plan was loaded, or was compiled for another device.
        """
        if self._step is None:
            raise StepError(
                "Plan.step: this plan holds no executable: it was loaded, or compiled for target"
                f" {self.target!r}, which is not this device; compile the step with jax.jit("
                f"{self._over_devices}, donate_argnums=0, compiler_options=plan.compiler_options)"
            )
        return self._step

    @property
    def is_compiled(self) -> bool:
        """Whether the plan has an executable, because it was made or verified on this device."""
        return self._step is not None

    def with_step(self, executable, split=None, create=None) -> "Plan":
        """Returns the plan with an executable that was compiled under the plan.

        executable: the compiled step. None leaves the plan's own executable.
        split, create: functions that move a state to the plan's places, and make a state there.
          None leaves the plan's own functions.
        """
        made = {"_step": executable, "_split": split, "_create": create}
        return dataclasses.replace(self, **{k: v for k, v in made.items() if v is not None})

    def place(self, state):
        """Moves a state to the memories that the plan chose, and returns the state.

        The original of an array that moves is deleted, as by the `split` of a released step.

        state: the state of the step, stored in any memory.

        Raises StepError if the plan places no states, or was loaded and not verified. Raises the
        errors of the released step's `split`.
        """
        return self._placing("place", self._split)(state, **self._where("place").split)

    def create(self, outer, layer):
        """Makes the first state in the memories that the plan chose, one layer at a time.

        The model need not fit into any single memory.

        outer: the parameters outside the layers, a dict.
        layer: a function. `layer(i)` returns the parameters of layer i; i is a traced int32.

        Raises StepError if the plan places no states, if the plan was loaded and not verified, and
        if the step's state holds more than the pair of parameters and optimizer's state. Raises the
        errors of the released step's `create`.
        """
        where = self._where("create")
        return self._placing("create", self._create)(outer, layer, where.layers, **where.split)

    def _where(self, method: str) -> Places:
        if self.places is None:
            raise StepError(
                f"Plan.{method}: this plan places no states; expected one that was made with"
                " decide=('actions', 'states')"
            )
        return self.places

    def _placing(self, method: str, placing):
        """What moves or makes states. Raises StepError where the plan knows none."""
        self._where(method)
        if placing is None:
            raise StepError(
                f"Plan.{method}: this plan was loaded, and knows no step; verify it by"
                " jaxmem.verify(plan, build, ...), or call build(plan).split(state,"
                " **plan.places.split), or its `create`, where nothing is divided over devices"
            )
        return placing

    @property
    def _over_devices(self) -> str:
        """What a user compiles of the step, in words."""
        if self.divided is None:
            return "build(plan)"
        return f"build(plan).data_parallel(mesh, {self.divided!r})"

    @property
    def keeps_everything(self) -> bool:
        """Whether every block runs without a checkpoint, and all states stay on the device."""
        return keeps_everything(self.actions) and (self.places is None or self.places.resident)

    def choices_for(self, block: str) -> dict[str, Choice]:
        """Returns the choices for the tags of one block: tag name -> choice.

        block: the label of the block.

        Raises TagError for a block that the plan does not decide.
        """
        return assignment.choices_of(self.actions, block, None, "plan")

    def groups(self, block: str) -> tuple[tuple[int, int], ...]:
        """Returns the groups of layers with separate decisions, as (start, stop) pairs in order.

        block: the label of the block.

        The result is empty if all layers of the block share one decision.
        """
        return ranges(self.actions, block)

    def timeline(self) -> Timeline:
        """Returns the predicted lanes of a step, layer by layer, in seconds.

        The lanes are compute, copies to the device, copies to the host, write-backs and
        collectives. `print` draws the lanes. The timeline's methods return the exposed seconds, in
        which the step waits for transfers.

        Raises StepError for a plan that places no states, because its layers are priced by tensor
        and not by lane. Raises StepError also for a plan that an older jaxmem wrote.
        """
        if self.lanes is None:
            why = "it places no states" if self.places is None else "an older jaxmem wrote it"
            raise StepError(
                f"Plan.timeline: this plan holds no lanes of its layers, since {why}; expected one"
                " that this jaxmem makes with decide=('actions', 'states')"
            )
        return self.lanes

    def pareto(self) -> tuple[Point, ...]:
        """Returns the predicted curve of least step time against bytes, by rising bytes."""
        return self.points

    def to_json(self) -> dict[str, Any]:
        """Returns the content of the plan's file, as plain dicts, lists, texts and numbers."""
        return file.write(vars(self))

    def save(self, path: str | os.PathLike) -> None:
        """Writes the plan as JSON. The file appears whole or not at all.

        path: the file.

        Raises OSError if the file cannot be written.
        """
        write_json(path, self.to_json())

    @staticmethod
    def load(path: str | os.PathLike) -> "Plan":
        """Reads a plan that `save` wrote.

        The plan has no executable until `jaxmem.verify` compiles its step.

        path: the file.

        Raises PlanFileError if the file is broken or has another schema; the message names the
        field.
        """
        try:
            data = read_json(path)
        except (OSError, ValueError) as error:
            raise PlanFileError(
                f"Plan.load: cannot read {str(path)!r}: {error}; expected a file that Plan.save"
                " wrote"
            ) from error
        return Plan(**file.read(data, str(path)))

    def __str__(self) -> str:
        return text.table(self)

    def _repr_html_(self) -> str:
        """The plan in a notebook."""
        return html.html(self)


def check_fingerprint(plan: Plan, found: str, what: str) -> None:
    """Raises PlanFileError unless a plan has the fingerprint of the model at hand.

    found: the model's fingerprint.
    what: the public function that the error is from.
    """
    if plan.fingerprint != found:
        model = f"and the model's is {found}: it has other layers, shapes, dtypes or tags"
        raise other_model(what, "fingerprint", plan.fingerprint, model)


def other_model(what: str, field: str, got, expected: str) -> PlanFileError:
    """The error of a plan that was made for another model.

    what: the public function that the error is from.
    field: the plan's field that differs.
    got, expected: its value, and the clause that says what the model has.
    """
    return PlanFileError(
        f"{what}: the plan is for another model: its `{field}` is {got}, {expected}; plan this"
        " model anew"
    )
