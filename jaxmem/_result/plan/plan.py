"""Plan: what was decided, frozen. Its JSON is in `file.py`, its table in `text.py`."""

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from jaxmem._core import assignment
from jaxmem._core.actions import Actions, Choice, keeps_everything
from jaxmem._core.files import read_json, write_json
from jaxmem._core.labels import ranges
from jaxmem._model.states.places import Places
from jaxmem._result.plan import file, html, text
from jaxmem._result.plan.rows import Bytes, Measured, Point, Row, WrittenStep
from jaxmem._result.plan.timeline import Timeline
from jaxmem.errors import PlanFileError, StepError


@dataclasses.dataclass(frozen=True)
class Plan:
    """The actions for a step's tensors, and what they cost. `jaxmem.plan` makes one, `Plan.load`
    reads one.

    Bytes are of the whole step on one device: arguments + temporaries + outputs - what is aliased.
    Seconds are of one step.

    Attributes:
      actions: block label -> tag name -> choice; layers that are decided apart stand under labels
        such as `block[0:6]`. Empty where the checkpoints of the step itself decide it.
      budget_bytes: what was asked for.
      predicted_bytes: what was predicted before the compile that gave `compiled_bytes`.
      compiled_bytes: what the verified step takes, by XLA's memory analysis.
      baseline_bytes: what the step takes with everything kept, without any checkpoint.
      host_bytes: what lies in host memory.
      predicted_seconds, baseline_seconds: of the step under the plan, and with everything kept.
      uncertain_seconds: by how much the difference of the two may be off.
      baseline_source: what told `baseline_seconds`: "measured" where the step was run, "xla" for
        XLA's estimate of the compiled step, "pieces" for the sum of its pieces.
      profile_seconds, solve_seconds, compile_seconds: what planning took.
      compiles: how many compiles it took.
      time_source: of the times of pieces: "measured", "xla" (its estimates) or "roofline".
      target: the device it was made for.
      fingerprint: of the model's blocks, layers and tags; another model's plan is refused by it.
      jax_version: the JAX that it was made with.
      parts, baseline_parts: the bytes by what they hold.
      points: see `pareto`.
      rows: the table, a row a tag.
      notes: what was left out, and why.
      measured: the steps that were run for `measure=`, the plan's among them.
      microbatches: how many were chosen; None where the planner was not asked to.
      batch: the size that was chosen for the arguments that are functions of one; None where the
        planner was not asked to.
      places: where the states of the layers lie; None where the planner was not asked to.
      divided: what is divided over devices, as the released step's `data_parallel` takes it:
        "nothing", "moments", "states" or "layers"; None where the planner was not asked to.
      compiler_options: XLA's options that the step was compiled with, for `jax.jit`; empty where
        nothing crosses to host memory in a loop.
      lanes: what `timeline` returns; None where states were not placed, or by an older jaxmem.
      as_written: whether the plan leaves the step as its author wrote it: `jaxmem.auto(step, plan)`
        is `step`.
      written: the step as its author wrote it, under any plan, where it has checkpoints of its own;
        None where it has none.
      lossy: which tensors are held with a loss, and what the best plan without one would take, as a
        sentence; empty where the backward reads the forward's own values.
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
        """The verified executable, called as the step is.

        Raises StepError if the plan was loaded, or compiled for another device.
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
        """Whether `step` is there to run: the plan was made or verified on this device."""
        return self._step is not None

    def with_step(self, executable, split=None, create=None) -> "Plan":
        """The same plan with the executable that was compiled under it.

        split, create: move a state of its step, and make one, where states are placed.
        """
        made = {"_step": executable, "_split": split, "_create": create}
        return dataclasses.replace(self, **{k: v for k, v in made.items() if v is not None})

    def place(self, state):
        """The state with its layers' arrays where the plan says. Those that move are deleted where
        they were, as by the `split` of a released step, whose errors are raised.

        Raises StepError if the plan places no states, or was loaded and not verified.
        """
        return self._placing("place", self._split)(state, **self._where("place").split)

    def create(self, outer, layer):
        """Makes the first state where the plan says, a layer at a time, as `create` of a released
        step does, whose errors are raised: of a model that fits nowhere whole.

        outer: the parameters outside the layers, a dict.
        layer: `layer(i)` makes the parameters of layer i, an int32 that is traced.

        Raises StepError as `place`, and for a step whose state holds more than the pair.
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
        """Whether nothing is under a checkpoint, and no state moved."""
        return keeps_everything(self.actions) and (self.places is None or self.places.resident)

    def choices_for(self, block: str) -> dict[str, Choice]:
        """Tag name -> choice, for one block. Raises TagError for a block that the plan does not
        know.
        """
        return assignment.choices_of(self.actions, block, None, "plan")

    def groups(self, block: str) -> tuple[tuple[int, int], ...]:
        """The groups of the block's layers that are decided apart: (start, stop), in order."""
        return ranges(self.actions, block)

    def timeline(self) -> Timeline:
        """The lanes of a step, layer by layer, in seconds as predicted: compute, copies to the
        device and to the host, what is written back. `print` draws them; its numbers say what of
        the copies no work hides.

        Raises StepError for a plan that places no states, whose layers are priced by what each
        tensor costs and not by lanes, and for one that an older jaxmem wrote.
        """
        if self.lanes is None:
            why = "it places no states" if self.places is None else "an older jaxmem wrote it"
            raise StepError(
                f"Plan.timeline: this plan holds no lanes of its layers, since {why}; expected one"
                " that this jaxmem makes with decide=('actions', 'states')"
            )
        return self.lanes

    def pareto(self) -> tuple[Point, ...]:
        """Least step time against bytes, as predicted, from the least bytes to everything kept."""
        return self.points

    def to_json(self) -> dict[str, Any]:
        """What `save` writes, as plain dicts, lists, texts and numbers."""
        return file.write(vars(self))

    def save(self, path: str | os.PathLike) -> None:
        """Writes the plan as JSON. The file appears whole or not at all. Raises OSError."""
        write_json(path, self.to_json())

    @staticmethod
    def load(path: str | os.PathLike) -> "Plan":
        """Reads a plan that `save` wrote; it holds no executable until `jaxmem.verify` compiles it.

        Raises PlanFileError, naming the field, if the file is broken or of another schema.
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
