"""The settings of a GPT, Llama or BERT on text."""

from typing import Annotated, Any, Literal, Self

import pydantic
from pydantic import Field

from experiments.config import sections
from experiments.config.models import Model
from experiments.config.sections import Count, Mesh, Path, Positive, Probability, Section, Text
from jaxmem.plans import Action

ActionName = Annotated[Action, Field(strict=False)]  # strict=False reads an action from its name
Decision = Literal["actions", "states", "sharding"]
CAUSAL = "gpt", "llama"  # models that continue a text
Size = int | float | Text  # a memory size, as `jaxmem.plan` reads it
CodecNames = Text | Annotated[list[Text], Field(min_length=1)]
PolicyName = Literal[
    "plan",
    "keep_everything",
    "keep_tags",
    "nothing_saveable",
    "dots_with_no_batch_dims_saveable",
    "offload_dot_with_no_batch_dims",
    "save_out_proj",
    "save_qkv_proj",
    "save_dot_except_mlp",
    "save_dot_with_context_except_mlp",
    "minimal",
    "minimal_with_context",
    "qkv_proj_offloaded",
    "minimal_offloaded",
    "compress_tags",
    "compress_tags_without_outliers",
    "naive_int4",
    "every_k",
    "estimator",
]


class Data(Section):
    path: Path | None = None  # a text file or a folder; default: the standard library


class Train(sections.Train):
    """`sequence`: tokens of an example. `loss_chunk`: positions whose logits are live at once."""

    sequence: Count
    loss_chunk: Count

    @pydantic.model_validator(mode="after")
    def _divides_the_sequence(self) -> Self:
        if self.sequence % self.loss_chunk:
            raise ValueError(
                f"train.loss_chunk: got {self.loss_chunk}; allowed: a divisor of train.sequence,"
                f" {self.sequence}"
            )
        return self


class Optimizer(sections.Optimizer):
    """`accumulation`: the update from a batch's microbatches. "scan" sums their gradients;
    "in_place" adds each layer's gradient to the sum in the backward; "multi_steps" is
    optax.MultiSteps; "adama" folds each microbatch's gradient into the moments; "released" folds
    each layer's gradient in the backward. With one microbatch, "released" updates the layer there
    by any optimizer.
    `clip`: clipping of the batch's gradient; AdamA clips each microbatch's gradient. "component",
    for "released" only, clips each layer's norm.
    """

    accumulation: Literal["scan", "in_place", "multi_steps", "adama", "released"] = "scan"
    beta2: Probability = 0.95
    weight_decay: sections.NonNegative = 0.1
    clip: Literal["none", "value", "component", "norm"] = "norm"
    clip_at: Positive = 1.0


class Sample(Section):
    """A text from the trained GPT or Llama: `length` bytes, sampled by the model's probabilities at
    `temperature`. At temperature 0, each byte is the likeliest.
    """

    length: Annotated[int, Field(ge=0, le=sections.LARGEST)] = 200
    temperature: sections.NonNegative = 0.8


class Plan(Section):
    """The arguments of `jaxmem.plan`. The default `budget` is the target's usable memory; "none"
    trains without a plan, with everything kept.

    `codecs`: a codec for every tag without a codec, or codecs for each kind of tensor.
    `batch`: the plan chooses `train.batch` among `sizes`, the largest that fits or the fastest.
    `decide`: "actions"; "states" in addition if the plan also chooses the layers whose states
    remain on the device; "sharding" in addition to both if it also chooses what devices divide.
    `rectify`: count outliers while training, and plan again if the counts require a new plan.
    `explain`: compile the step and everything kept once more, and show their memory on the page.
    """

    budget: Size | None = None
    host_budget: Size | None = None
    target: Text = "local"
    actions: Annotated[list[ActionName], Field(min_length=1)] | Literal["all", "lossless"] = "all"
    codecs: CodecNames | dict[str, CodecNames] | None = None
    path: Path | None = None  # the file of a plan to train under
    rectify: bool = False
    explain: bool = False
    batch: Literal["max", "fastest"] | None = None
    sizes: Annotated[list[Count], Field(min_length=1)] | None = None  # default: all that divide
    decide: list[Decision] | None = None  # default: only actions

    @property
    def decided(self) -> list[Decision]:
        """The decisions of the plan."""
        return ["actions"] if self.decide is None else self.decide

    @property
    def divides(self) -> bool:
        """Whether the plan divides the step over devices."""
        return "sharding" in self.decided

    @pydantic.model_validator(mode="after")
    def _chooses_a_size(self) -> Self:
        if self.sizes is not None and self.batch is None:
            raise ValueError(
                f"plan.sizes: got {self.sizes} without plan.batch; allowed beside plan.batch ="
                " 'max' or 'fastest' only"
            )
        return self


class Remat(Section):
    """The policy of the layers' checkpoints: "plan" is a plan of jaxmem; the other policies are
    alternatives without jaxmem (`running/policies.py`).

    "every_k" and "estimator" search for a policy within `plan.budget`. Every other named policy
    ignores the budget.
    """

    policy: PolicyName = "plan"
    every_k: Count | None = None  # "every_k" recomputes every k-th layer; default: as few as fit

    @pydantic.model_validator(mode="after")
    def _belongs(self) -> Self:
        if self.every_k is not None and self.policy != "every_k":
            raise ValueError(
                f"remat.every_k: got {self.every_k}; allowed with remat.policy = 'every_k' only,"
                f" and it is {self.policy!r}"
            )
        return self

    @property
    def searches(self) -> bool:
        return self.policy == "estimator" or (self.policy == "every_k" and self.every_k is None)


class States(Section):
    """Where the layers' parameters and moments are stored: for the first `persist` layers on the
    device, for the other layers in pinned host memory, from which a released step copies one layer
    at a time. `copies`, `buffers` and `outer_moments` are arguments of a released step's `split`.
    Default: on the device, or as the plan decides if `plan.decide` has "states".
    """

    persist: Annotated[int, Field(ge=0, le=sections.LARGEST)] | None = None
    copies: Annotated[int, Field(ge=0, le=sections.LARGEST)] = 0
    buffers: Annotated[int, Field(ge=0, le=sections.LARGEST)] = 0
    outer_moments: Literal["device", "pinned_host"] = "device"

    @property
    def where(self) -> dict[str, Any] | None:
        """The arguments of a released step's `split`, by name; None if all states are on the
        device.
        """
        return None if self.persist is None else self.model_dump()

    @pydantic.model_validator(mode="after")
    def _needs_persist(self) -> Self:
        if self.persist is None and (given := self.model_fields_set - {"persist"}):
            key = min(given)
            raise ValueError(
                f"states.{key}: got {getattr(self, key)!r} without states.persist; allowed beside"
                " states.persist only, which says how many layers stay on the device"
            )
        return self


class Config(sections.Trained):
    model: Model
    data: Data = Data()
    train: Train
    optimizer: Optimizer
    plan: Plan = Plan()
    remat: Remat = Remat()
    states: States = States()
    sample: Sample = Sample()
    mesh: Mesh = Mesh()

    @property
    def sampled(self) -> int:
        """Number of bytes to sample after training: 0 for a model that is not causal."""
        return self.sample.length if self.model.kind in CAUSAL else 0

    @property
    def streams(self) -> bool:
        """Whether states of layers may be stored in host memory."""
        return self.states.persist is not None or "states" in self.plan.decided

    @property
    def devices(self) -> Mesh:
        """The mesh of training. A plan that divides the step divides it over all devices."""
        return Mesh(data=-1) if self.plan.divides else self.mesh

    def placed_by(self, plan) -> Self:
        """Returns the config with the states placed as by `plan`, unchanged if it places none."""
        if plan is None or plan.places is None:
            return self
        return self.model_copy(update={"states": States(**plan.places.split)})

    @pydantic.model_validator(mode="after")
    def _has_a_plan_to_rectify(self) -> Self:
        if self.plan.rectify and (self.remat.policy != "plan" or self.plan.budget == "none"):
            raise ValueError(
                f"plan.rectify: got true beside remat.policy = {self.remat.policy!r} and"
                f" plan.budget = {self.plan.budget!r}; allowed there: false, since nothing is"
                " planned"
            )
        return self

    @pydantic.model_validator(mode="after")
    def _has_a_plan_to_choose_a_size(self) -> Self:
        if self.plan.batch and (self.remat.policy != "plan" or self.plan.budget == "none"):
            raise ValueError(
                f"plan.batch: got {self.plan.batch!r} beside remat.policy = {self.remat.policy!r}"
                f" and plan.budget = {self.plan.budget!r}; allowed there: nothing, since nothing is"
                " planned"
            )
        return self

    @pydantic.model_validator(mode="after")
    def _continues(self) -> Self:
        if "length" in self.sample.model_fields_set and self.sample.length > self.sampled:
            raise ValueError(
                f"sample.length: got {self.sample.length}; allowed with model.kind ="
                f" {self.model.kind!r}: 0, since it sees what comes after a byte too"
            )
        return self

    @pydantic.model_validator(mode="after")
    def _is_decided(self) -> Self:
        decide = self.plan.decided
        if "actions" not in decide or (self.plan.divides and "states" not in decide):
            raise ValueError(
                f"plan.decide: got {decide}; allowed: ['actions'], ['actions', 'states'], or"
                " ['actions', 'states', 'sharding']"
            )
        alone = {
            "model.dropout": self.model.dropout,
            "model.attention_dropout": self.model.attention_dropout,
            "plan.explain": self.plan.explain,
        }
        if self.plan.divides and (key := next((key for key in alone if alone[key]), None)):
            raise ValueError(
                f"{key}: got {alone[key]} beside plan.decide = {decide}; allowed there: nothing,"
                " since the released step alone is divided"
            )
        if "states" not in decide:
            return self
        if self.states.persist is not None:
            raise ValueError(
                f"states.persist: got {self.states.persist} beside plan.decide = {decide};"
                " allowed there: nothing, since the plan decides it"
            )
        for key, got in (("accumulation", "released"), ("clip", "norm")):
            value = getattr(self.optimizer, key)
            if (value == got) == (key == "clip"):
                allowed = "'none', 'value', 'component'" if key == "clip" else "'released'"
                raise ValueError(
                    f"optimizer.{key}: got {value!r} beside plan.decide = {decide}; allowed"
                    f" there: {allowed}"
                )
        return self

    @pydantic.model_validator(mode="after")
    def _is_divided(self) -> Self:
        if not self.mesh.divides:
            return self
        if self.streams:
            raise ValueError(
                f"mesh: got {self.mesh.sizes} beside states.persist = {self.states.persist} and"
                f" plan.decide = {self.plan.decided}; allowed where states may be in host memory:"
                " no mesh, since a plan that decides 'sharding' makes its own"
            )
        return self

    @pydantic.model_validator(mode="after")
    def _streams(self) -> Self:
        if (persist := self.states.persist) is None:
            return self
        if persist > self.model.layers:
            raise ValueError(
                f"states.persist: got {persist}; allowed: at most model.layers, {self.model.layers}"
            )
        if self.optimizer.accumulation != "released":
            raise ValueError(
                f"optimizer.accumulation: got {self.optimizer.accumulation!r} beside"
                " states.persist; allowed there: 'released', whose backward updates a layer at a"
                " time"
            )
        return self

    @pydantic.model_validator(mode="after")
    def _agrees(self) -> Self:
        way = self.optimizer.accumulation
        if way in ("in_place", "released") and self.model.loop != "stack":
            raise ValueError(
                f"model.loop: got {self.model.loop!r}; allowed with optimizer.accumulation ="
                f" {way!r}: 'stack', whose"
                " backward lets a layer's gradient go"
            )
        if way == "adama":
            sections.refuse_folding(self.optimizer, "optimizer.accumulation = 'adama'")
        if way == "released" and self.train.microbatches > 1:
            sections.refuse_folding(
                self.optimizer, "optimizer.accumulation = 'released' and several train.microbatches"
            )
        sections.refuse_rows(
            self.optimizer,
            way == "adama" or (way == "released" and self.optimizer.name == "adamw"),
        )
        if self.optimizer.clip == "component" and way != "released":
            raise ValueError(
                "optimizer.clip: got 'component'; allowed with optimizer.accumulation ="
                f" {self.optimizer.accumulation!r}:"
                " 'none', 'value', 'norm'"
            )
        if self.remat.every_k is not None and self.remat.every_k > self.model.layers:
            raise ValueError(
                f"remat.every_k: got {self.remat.every_k}; allowed: at most model.layers,"
                f" {self.model.layers}"
            )
        if self.remat.policy != "plan" and self.model.loop == "stack":
            raise ValueError(
                f"model.loop: got 'stack' beside remat.policy = {self.remat.policy!r}; allowed"
                " there: 'scan', since a"
                " policy other than a plan's goes with jax.checkpoint"
            )
        if self.remat.policy != "plan" and self.plan.path is not None:
            raise ValueError(
                f"remat.policy: got {self.remat.policy!r} beside plan.path; allowed there: 'plan',"
                " since the file decides"
            )
        if self.remat.searches and self.plan.budget == "none":
            raise ValueError(
                f"plan.budget: got 'none'; allowed with remat.policy = {self.remat.policy!r}: bytes"
                " to search within"
            )
        return self
