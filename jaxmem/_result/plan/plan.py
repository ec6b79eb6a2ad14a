"""Plan: the frozen result of planning, and its text: a table with a line for each tag, and the
whole step's bytes and times. `file.py` has its JSON form.
"""

import dataclasses
import os
from collections.abc import Collection, Mapping
from typing import Annotated, Any

from jaxmem._core import assignment
from jaxmem._core.actions import EVERYTHING_KEPT, Actions, Choice
from jaxmem._core.bytes import show_bytes
from jaxmem._core.files import write_json, write_whole
from jaxmem._core.groups import keeps_everything, ranges
from jaxmem._core.lists import aligned
from jaxmem._core.reader import Count, Name, one_of
from jaxmem._model.states.places import DIVIDED, DIVIDED_WORDS, Places
from jaxmem._result.plan import file, html, maxtext
from jaxmem._result.plan.rows import OPTION, Bytes, Measured, Point, Row, WrittenStep
from jaxmem._result.plan.timeline import Timeline
from jaxmem._target.devices.target import Target
from jaxmem.errors import PlanFileError, StepError, TargetError

HEAD = ("tensor", "kind", "action", "codec", "before", "after", "ms", "why")
AS_WRITTEN = "the step is left as it is written: the checkpoints of its own decide it"

# Sources of the seconds of the step with everything kept, in words.
STEP_SOURCES = {"measured": "measured", "xla": "XLA's estimate", "pieces": "the sum of its pieces"}


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
      fingerprint: a hash of the labels and the numbers of layers of the model's blocks, and of the
        names, shapes and dtypes of their tags. `jaxmem.verify` refuses a plan with another
        fingerprint than the model's.
      jax_version: the version of JAX that planned the step.
      parts, baseline_parts: bytes by use, under the plan and with everything kept.
      points: the curve that `pareto` returns.
      rows: the plan's table, with one row per tag.
      notes: sentences for the user, such as actions that were left out, and why.
      measured: the steps that ran for comparison, the plan's step among them.
      microbatches: the chosen number of microbatches. None if the plan did not choose a number.
      batch: the chosen size for the arguments that are functions of a size. None if the plan did
        not choose a size.
      moments: how the released step stores the optimizer's moments: "float" as the optimizer does,
        or "int8" in 8 bits. `jaxmem.released_step(..., plan=plan)` follows it.
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
        best lossless plan; or that says why the moments are in 8 bits. Empty if nothing is stored
        with a loss.
    """

    actions: Actions
    budget_bytes: Count
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
    time_source: Name
    target: Name
    fingerprint: Name
    jax_version: Name
    parts: Bytes
    baseline_parts: Bytes
    points: tuple[Point, ...] = ()
    rows: tuple[Row, ...] = ()
    notes: tuple[str, ...] = ()
    microbatches: Count | None = None
    batch: Count | None = None
    uncertain_seconds: float = 0.0
    baseline_source: Name = "pieces"
    measured: tuple[Measured, ...] = ()
    places: Places | None = None
    compiler_options: Mapping[str, OPTION] = dataclasses.field(default_factory=dict)
    divided: Annotated[str, one_of(DIVIDED)] | None = None
    lanes: Timeline | None = None
    as_written: bool = False
    written: WrittenStep | None = None
    lossy: str = ""
    moments: Annotated[str, one_of(assignment.MOMENTS)] = assignment.FLOAT
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
            over = "" if self.divided is None else f".data_parallel(mesh, {self.divided!r})"
            raise StepError(
                "Plan.step: this plan holds no executable: it was loaded, or compiled for target"
                f" {self.target!r}, which is not this device; compile the step with"
                f" jax.jit(build(plan){over}, donate_argnums=0,"
                " compiler_options=plan.compiler_options)"
            )
        return self._step

    def __getstate__(self) -> dict[str, Any]:
        """The fields for pickle: without the executable, as in a file of the plan."""
        return vars(self) | dict.fromkeys(("_step", "_split", "_create"))

    def __deepcopy__(self, _) -> "Plan":
        """The plan itself, which is never changed: an executable cannot be copied."""
        return self

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

        The original of an array that moves is deleted, as by the `split` of a released step. If the
        plan's `moments` are "int8", float moments are converted first, as by `quantized_state` of
        the released step.

        state: the state of the step, stored in any memory, with float moments or with the moments
          of the plan.

        Raises StepError if the plan places no states, or was loaded and not verified. Raises the
        errors of the released step's `split`.
        """
        return self._placing("place", self._split)(state, **self._required_places("place").split)

    def create(self, params, layer=None):
        """Makes the first state in the memories that the plan chose, one layer at a time.

        The model need not fit into any single memory.

        params: the parameters outside the layers, a dict. For the step of a whole loss, all
          parameters, a tree of NumPy arrays.
        layer: a function. `layer(i)` returns the parameters of layer i; i is a traced int32. None
          for the step of a whole loss.

        Raises StepError if the plan places no states, if the plan was loaded and not verified, and
        if the step's state holds more than the pair of parameters and optimizer's state. Raises the
        errors of the released step's `create`.
        """
        where = self._required_places("create")
        return self._placing("create", self._create)(params, layer, where.layers, **where.split)

    def _required_places(self, method: str) -> Places:
        """The places of the model states. Raises StepError if the plan places none."""
        if self.places is None:
            raise StepError(
                f"Plan.{method}: this plan places no states; expected one that was made with"
                " decide=('actions', 'states')"
            )
        return self.places

    def _placing(self, method: str, placing):
        """The function that moves or makes states. Raises StepError if the plan has none."""
        self._required_places(method)
        if placing is None:
            raise StepError(
                f"Plan.{method}: this plan was loaded, and knows no step; verify it by"
                " jaxmem.verify(plan, build, ...), or call build(plan).split(state,"
                " **plan.places.split), or its `create`, where nothing is divided over devices"
            )
        return placing

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

    def groups(self, block: str) -> tuple[tuple[int, ...], ...]:
        """Returns the groups of layers with separate decisions, in order, as (start, stop), or as
        (start, stop, span) for layers in spans.

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
        return file.write(self)

    def save(self, path: str | os.PathLike) -> None:
        """Writes the plan as JSON. The file appears whole or not at all.

        path: the file.

        Raises OSError if the file cannot be written.
        """
        write_json(path, self.to_json())

    def save_compiled(self, path: str | os.PathLike) -> None:
        """Writes the plan's executable as MaxText's `compiled_trainstep_file`.

        The file holds the bytes of `jax.experimental.serialize_executable.serialize`. MaxText loads
        the file with the same versions of JAX and XLA, on the same kind and number of devices. The
        file is a pickle: loading a file from somebody else can run any code.

        path: the file. It appears whole or not at all.

        Raises StepError if the plan has no executable, because it was loaded, or compiled for
        another device, and if the executable is from nnx.jit. Raises OSError if the file cannot be
        written.
        """
        if self._step is None:
            raise StepError(
                "Plan.save_compiled: this plan holds no executable: it was loaded, or compiled for"
                f" target {self.target!r}, which is not this device; plan or verify it where it"
                " trains, or give MaxText's train_compile the flags of plan.to_maxtext()"
            )
        import jax  # a plan's file is read without JAX
        from jax.experimental.serialize_executable import serialize

        if not isinstance(self._step, jax.stages.Compiled):
            raise StepError(
                f"Plan.save_compiled: the executable is {type(self._step).__name__}, whose modules"
                " MaxText does not read; expected a plan of a jax.jit step or of a plain function"
            )
        write_whole(path, serialize(self._step)[0])

    def to_maxtext(self, names: Collection[str] | None = None) -> dict[str, str]:
        """Returns the plan as flags of MaxText: flag -> value.

            " ".join(f"{flag}={value}" for flag, value in plan.to_maxtext().items())

        The flags select MaxText's remat policy `custom`, and name the location of each tensor that
        the plan decides: device, offload or remat. `microbatches` and `batch` are not among the
        flags.

        names: the tensors of your MaxText's policy `custom`. None means the tensors of MaxText
          0.2.5. MaxText also accepts flags that the policy does not read, such as `engram`.

        Raises TagError, a ValueError, for a plan that these flags cannot express. Such a plan
        compresses, keeps everything, leaves the step as written, places or divides model states,
        decides groups of layers apart, decides a name differently in two blocks, or decides a
        tensor that is not in `names`.
        """
        return maxtext.flags(self, names)

    @staticmethod
    def load(path: str | os.PathLike) -> "Plan":
        """Reads a plan that `save` wrote.

        The plan has no executable until `jaxmem.verify` compiles its step.

        path: the file.

        Raises PlanFileError if the file is broken or has another schema; the message names the
        field.
        """
        return file.load(Plan, path)

    def __str__(self) -> str:
        table = aligned([HEAD, *cells(self)]) if self.actions else [AS_WRITTEN]
        return "\n".join([*table, *summary(self)])

    def _repr_html_(self) -> str:
        """The plan in a notebook."""
        return html.html(HEAD, cells(self), summary(self), self.lanes)


def cells(plan: Plan) -> list[tuple[str, ...]]:
    """The rows of the table without the head: a text for each column of `HEAD`."""
    lines = []
    for row in plan.rows:
        name = row.tag if len(plan.actions) == 1 else f"{row.block}/{row.tag}"
        name += f" {row.size}" if row.count > 1 else ""
        # a codec's name without its settings
        codec = (row.choice.codec or "-").split("(")[0]
        sizes = show_bytes(row.bytes_before), show_bytes(row.bytes_after)
        ms = f"{row.milliseconds:.3f}"
        lines.append((name, row.kind or "-", row.choice.action.value, codec, *sizes, ms, row.why))
    return lines


def in_8_bits(plan: Plan) -> str:
    """The moments of a plan in words, after the places of the states."""
    return "; moments in 8 bits" if plan.moments == assignment.INT8 else ""


def of_each(plan: Plan) -> str:
    """Words to add to the bytes of one device if the plan is for several devices, else ""."""
    if plan.target == "local":
        return ""
    try:
        devices = Target.parse(plan.target).devices
    except TargetError:  # a file of another version of jaxmem may name an unknown target
        return ""
    return f", on each of {devices} devices" if devices > 1 else ""


def times(plan: Plan) -> str:
    """The predicted time of the step and of the step with everything kept, their sources, and the
    uncertainty of the difference.
    """
    ms = lambda seconds: f"{seconds * 1e3:.2f} ms"
    longer, doubt = plan.predicted_seconds - plan.baseline_seconds, plan.uncertain_seconds
    whole = STEP_SOURCES.get(plan.baseline_source, plan.baseline_source)
    kept = f"everything kept {ms(plan.baseline_seconds)} ({whole})"
    if plan.keeps_everything:
        step = f"step with {kept}"
        return step if plan.written is None else f"{step}, as written {ms(plan.written.seconds)}"
    if abs(longer) <= doubt:
        difference = f"equal as far as is known, ± {ms(doubt)}"
    else:
        difference = f"{ms(abs(longer))} {'more' if longer > 0 else 'less'}, ± {ms(doubt)}"
    own = "" if plan.written is None else f", as written {ms(plan.written.seconds)}"
    if plan.as_written:
        return f"step as written {ms(plan.predicted_seconds)}, {kept}: {difference}"
    step = f"step {ms(plan.predicted_seconds)} as predicted{own}, {kept}: {difference}"
    return f"{step} (times of pieces: {plan.time_source})"


def pace(plan: Plan) -> str:
    """The difference of the step time from the step with everything kept, in words: measured if
    both steps ran, else predicted.
    """
    if plan.keeps_everything or not plan.baseline_seconds:
        return "which is the fastest known"
    seconds, kept, doubt = plan.predicted_seconds, plan.baseline_seconds, plan.uncertain_seconds
    how = "predicted"
    ran = [m for m in plan.measured if m.chosen or m.name == EVERYTHING_KEPT]
    if len(ran) == 2:
        one, other = sorted(ran, key=lambda m: not m.chosen)
        how, seconds, kept = "measured", one.median, other.median
        doubt = (one.upper - one.lower + other.upper - other.lower) / 2
    slower = seconds / kept - 1
    if abs(slower) <= max(doubt / kept, 5e-4):
        return "in the same step time, as far as times are known"
    return f"for {100 * abs(slower):.1f} % {'more' if slower > 0 else 'less'} step time as {how}"


def measured(plan: Plan) -> list[str]:
    """A line for each step that ran for the plan, the fastest first."""
    return [
        f"measured: {one.median * 1e3:.2f} ms ({one.lower * 1e3:.2f} to {one.upper * 1e3:.2f} in"
        f" {one.rounds} rounds), {show_bytes(one.bytes)}: {one.name}"
        + (", which is chosen" if one.chosen else "")
        for one in sorted(plan.measured, key=lambda one: one.median)
    ]


def summary(plan: Plan) -> list[str]:
    """The lines under the table: bytes and times of the whole step, and notes."""
    share = 100 * plan.compiled_bytes / plan.budget_bytes
    host = f"; in host memory: {show_bytes(plan.host_bytes)}" if plan.host_bytes else ""
    numbers = {"microbatches": plan.microbatches, "batch": plan.batch}
    chosen = "".join(f"; {name}: {number}" for name, number in numbers.items() if number)
    own = "" if plan.written is None else f"; as written: {show_bytes(plan.written.bytes)}"
    return [
        *([f"(bytes and ms of one layer{of_each(plan)})"] if plan.rows else []),
        f"predicted {show_bytes(plan.predicted_bytes)}, compiled {show_bytes(plan.compiled_bytes)}"
        f" of a budget of {show_bytes(plan.budget_bytes)} ({share:.1f} %) on {plan.target};"
        f" everything kept: {show_bytes(plan.baseline_bytes)}{own}{host}",
        *([] if plan.places is None else [f"states: {plan.places}{in_8_bits(plan)}"]),
        *([] if plan.divided is None else [f"over devices: {DIVIDED_WORDS[plan.divided]}"]),
        f"{times(plan)}; {plan.compiles} compile{'' if plan.compiles == 1 else 's'}{chosen}",
        *measured(plan),
        *([f"lossy: {plan.lossy}"] if plan.lossy else []),
        *(f"note: {note}" for note in plan.notes),
    ]


def check_is_plan(by: str, **plans) -> None:
    """Raises StepError unless all arguments `plans` of the function `by` are plans."""
    for name, plan in plans.items():
        if not isinstance(plan, Plan):
            raise StepError(
                f"{by}: `{name}` is {type(plan).__name__}; expected a plan, from jaxmem.plan, or"
                " from jaxmem.Plan.load(path) for the path of a plan's file"
            )


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
