"""A profile as a mixed-integer linear program: binary choices, and what follows from them.

For each (block label, tag, choice) a binary variable says whether the tag takes the choice. All
other variables are continuous: whether a tag is demanded, whether an equation is recomputed, how
long transfers are exposed. The constraints leave each of them one value once the choices are fixed,
or, where time is minimised, one best value.
"""

import dataclasses
import math

import pulp

from jaxmem._core.actions import RECOMPUTE, Actions, Choice
from jaxmem._core.profile import BlockClass
from jaxmem._planner.solve.cost import Cost, option_of
from jaxmem._planner.solve.demand import ALWAYS, Demand, When, demand_of
from jaxmem._planner.solve.problem import Problem
from jaxmem.errors import SolverError

# Recomputation is priced a hair above its time. At its time, recomputing something useless would
# hide as many seconds of a transfer as it costs, and look free.
RECOMPUTE_PRICE = 1.001
MOST_UNITS = 1_000_000  # the sizes in a limit add up to at most so many units
TIE = 1e-7  # the weight of all bytes against all seconds, and the reverse: it only breaks ties

Choices = dict[tuple[str, str], tuple[Choice, ...]]


@dataclasses.dataclass(frozen=True)
class Scale:
    """Units in which the bytes of a whole step come to at most 10⁴, and its seconds to 10⁵.

    That is about MiB and µs for a common step. HiGHS's tolerances are absolute, so that a small
    step and a large one must look alike to it.

    bytes, seconds: how many of each make one unit.
    """

    bytes: float
    seconds: float

    @staticmethod
    def of(problem: Problem, choices: Choices) -> "Scale":
        """Bounds the step's bytes and seconds by the dearest open option of every tag, all inputs
        kept raw, and every equation recomputed.
        """
        profile, size, seconds = problem.profile, 0.0, 0.0
        for b in profile.blocks:
            options = [
                [o for o in t.options if o.choice in choices[b.name, t.name]] for t in b.tags
            ]
            device, host, keeping, doubt = (
                _most(options, what) for what in ("device_bytes", "host_bytes", "seconds", "doubt")
            )
            transfer = 2 * host / profile.link_bytes_per_second if host else 0.0
            recompute = sum(e.seconds for e in b.equations)
            size += b.layers * (device + host + sum(b.values[v] for v in b.inputs))
            seconds += b.runs * (recompute + keeping + doubt + sum(b.input_seconds) + transfer)
        for key, open_ in choices.items():
            size += max((abs(problem.working.get((*key, c), 0.0)) for c in open_), default=0)
            seconds += max((abs(problem.corrections.get((*key, c), 0.0)) for c in open_), default=0)
        return Scale((size or 1.0) / 1e4, (seconds or 1.0) / 1e5)


def _most(options, what: str) -> float:
    """The sum over tags of the greatest `what` among each tag's options."""
    return sum(max((getattr(o, what) for o in tag), default=0) for tag in options)


class MixedIntegerProgram:
    """The mixed-integer program of a profile. Only the choices are binary; what is demanded follows
    from them, and comes out as 0 or 1 by itself.
    """

    def __init__(self, problem: Problem, choices: Choices, scale: Scale):
        """Builds the program without limits and goal, which `limit` and `minimise` add.

        problem: gives the profile and the working memory of each choice.
        choices: those open to each (block label, tag), at least one.
        scale: the units of bytes and seconds.
        """
        self.problem = pulp.LpProblem("plan", pulp.LpMinimize)
        self._scale, self._profile = scale, problem.profile
        self._count = 0
        # Always 1, for what is demanded whatever is chosen: PuLP does not take an expression of
        # constants alone for a constraint.
        self._one = self._variable(low=1.0)
        self._pick = {
            (*key, c): self._variable(binary=True) for key, open_ in choices.items() for c in open_
        }
        self._choices = choices
        # Terms of the sums over the whole step, which `_add_block` fills.
        self._saved, self._host = [], []  # (bytes of all layers, variable)
        # (scaled seconds of all runs, variable)
        self._recompute, self._other, self._doubt = [], [], []
        self._working = [
            (size, self._pick[key]) for key, size in problem.working.items() if key in self._pick
        ]
        for key, open_ in choices.items():
            self._add(pulp.lpSum(self._pick[*key, c] for c in open_) == 1)
        # By (label, tag): for each class of the label, the variable of whether the tag is demanded.
        demanded: dict[tuple[str, str], list] = {key: [] for key in choices}
        for block in problem.profile.blocks:
            self._add_block(block, demand_of(block), demanded)
        for key, when in demanded.items():
            # A tag that no class demands is recomputed. An action that does nothing would otherwise
            # be taken where the model says that it lowers working memory.
            # (`in` would compare variables with `==`, which makes a constraint in PuLP 3.)
            if not any(w is self._one for w in when):
                stored = pulp.lpSum(self._pick[*key, c] for c in choices[key] if c != RECOMPUTE)
                self._add(stored <= pulp.lpSum(when))
        self._bytes = _sum((size / scale.bytes, v) for size, v in self._saved + self._working)
        self._seconds = _sum([(RECOMPUTE_PRICE * c, v) for c, v in self._recompute] + self._other)
        corrected = (
            (s, self._pick[key]) for key, s in problem.corrections.items() if key in self._pick
        )
        self._cautious = self._seconds + _sum(self._doubt)
        self._cautious += _sum((s / scale.seconds, v) for s, v in corrected)

    def limit(self, room: int | None, host_room: int | None, *, strict: bool = False) -> None:
        """Limits bytes to `room` and `host_room`; None means no limit.

        `strict` rounds sizes up: every remaining assignment fits, but some that fit are lost.
        Otherwise sizes are rounded down: none that fits is lost, but some that remain may not fit.
        """
        if room is not None:
            self._limit(self._saved + self._working, room, strict)
        if host_room is not None:
            self._limit(self._host, host_room, strict)

    def minimise(self, goal: str) -> None:
        """Sets the goal, "time" or "bytes"; the other one breaks ties. Time is that by which
        assignments are ranked, with the doubt of lossy codecs.
        """
        # All scaled bytes are a tenth of all scaled seconds (`Scale`), hence the factor 10.
        if goal == "time":
            self.problem += self._cautious + self._bytes * (10 * TIE)
        else:
            self.problem += self._bytes * 10.0 + self._cautious * TIE

    def refuse(self, actions: Actions) -> None:
        """Excludes one assignment that `effective` returned: at least one tag must differ."""
        chosen = {(label, tag, c) for label, tags in actions.items() for tag, c in tags.items()}
        picked = [variable for key, variable in self._pick.items() if key in chosen]
        # If a choice of it is not open, the program cannot return the assignment anyway.
        if len(picked) == len(self._choices) > 0:
            self._add(pulp.lpSum(picked) <= len(picked) - 1)

    def actions(self) -> Actions:
        """The assignment that was found. A binary variable may come out as 0.9999999, hence the
        maximum.
        """
        result: Actions = self._profile.everything_recomputed
        for (label, name), open_ in self._choices.items():
            result[label][name] = max(
                open_, key=lambda c: self._pick[label, name, c].varValue or 0.0
            )
        return result

    def agree(self, cost: Cost) -> None:
        """Raises SolverError unless the program's own sums, minimised for time, are those of the
        graph, within 1e-5 of the whole step.

        cost: the price of the assignment found, by `evaluate`.
        """
        seconds = cost.seconds + (RECOMPUTE_PRICE - 1) * cost.recompute_seconds
        for what, got, expected, unit, tolerance in (
            ("seconds", self._seconds, seconds, self._scale.seconds, self._scale.seconds),
            ("bytes", _sum(self._saved), cost.saved_bytes, 1.0, 0.1 * self._scale.bytes),
            ("host bytes", _sum(self._host), cost.host_bytes, 1.0, 0.1 * self._scale.bytes),
        ):
            value = (got.value() or 0.0) * unit
            if abs(value - expected) > tolerance:
                raise SolverError(
                    f"the solver says {value:.9g} {what} and the graph {expected:.9g} for the same"
                    " assignment; the profile's numbers may differ by too many orders of magnitude"
                )

    def _add_block(self, block: BlockClass, demand: Demand, demanded) -> None:
        """Adds a block class: its constraints, and its terms of the sums.

        block: the class.
        demand: its graph, reduced to tags.
        demanded: the variable of each tag's demand is appended to its list here.
        """
        # `run` turns seconds of one run into scaled seconds of the step.
        label, run, layers = block.name, block.runs / self._scale.seconds, block.layers
        # By position in `demand.tags`: the variable of "demanded and recomputed", which passes
        # demand on to what lies before the tag; None where the tag may not be recomputed. A tag
        # comes after those that pass demand on to it, so that theirs stand here when it is reached.
        passes: list = []
        known: dict[When, pulp.LpVariable] = {ALWAYS: self._one}
        transfer = []  # (bytes of one run, variable)
        for tag, when in demand.tags:
            key = (label, tag.name)
            wanted = self._any(when, passes, known)
            demanded[key].append(wanted)
            # `does` says which choice takes effect: the one picked, if the tag is demanded at all.
            # It is the product of the two, linear since exactly one choice is picked.
            does = {c: self._pick[*key, c] for c in self._choices[key]}
            if when != ALWAYS:
                picked, does = does, {c: self._variable() for c in does}
                self._add(pulp.lpSum(does.values()) == wanted)
                for c, variable in does.items():
                    self._add(variable <= picked[c])
            passes.append(does.get(RECOMPUTE))
            for choice, variable in does.items():
                if choice != RECOMPUTE:
                    option = option_of(block, tag, choice)
                    self._saved.append((option.device_bytes * layers, variable))
                    self._other.append((option.seconds * run, variable))
                    self._doubt.append((option.doubt * run, variable))
                    self._host.append((option.host_bytes * layers, variable))
                    transfer.append((option.host_bytes, variable))
        recompute = [
            (s, self._any(w, passes, known)) for w, s in demand.recompute_seconds.items() if s
        ]
        self._recompute += [(s * run, v) for s, v in recompute]
        for when, size in demand.input_bytes.items():
            self._saved.append((size * layers, self._any(when, passes, known)))
        for when, seconds in demand.input_seconds.items():
            self._other.append((seconds * run, self._any(when, passes, known)))
        if any(size for size, _ in transfer):
            self._expose(block, transfer, recompute)

    def _expose(self, block: BlockClass, transfer, recompute) -> None:
        """Prices transfers at what the block's own work does not hide, each way.

        The forward hides them by itself alone, the backward also by what it recomputes. `exposed`
        has only a lower bound, the excess (or 0): minimising time makes it tight.
        """
        unit, link = self._scale.seconds, self._profile.link_bytes_per_second
        moved = _sum([(size / link / unit, v) for size, v in transfer if size])
        for hidden, work in ((block.forward_seconds, []), (block.backward_seconds, recompute)):
            exposed = self._variable(high=None)  # scaled seconds of one run
            self._add(exposed >= moved - _sum([(s / unit, v) for s, v in work]) - hidden / unit)
            self._other.append((float(block.runs), exposed))

    def _limit(self, terms: list, most: int, strict: bool) -> None:
        """Limits the sum of `terms` (bytes, variable) to `most`, in whole units and half a unit
        away from every assignment.

        HiGHS answers wrongly, with or without presolve, where a sum lies within about 1e-8 of its
        limit (seen on 1.15). Rounded down, no assignment that fits is lost; one that does not is
        refused when it is counted exactly.
        """
        # Units of the gcd of whole sizes count those exactly. Where that would take too many of
        # them, units are larger, and sizes are rounded.
        whole = math.gcd(*(size for size, _ in terms if isinstance(size, int)))
        unit = max(whole, sum(abs(size) for size, _ in terms) / MOST_UNITS) or 1
        if most < sum(size for size, _ in terms if size > 0):  # else every assignment fits
            rounded = ((-(-size // unit) if strict else size // unit, v) for size, v in terms)
            self._add(_sum(rounded) <= most // unit + 0.5)

    def _any(self, when: When, passes: list, known: dict) -> pulp.LpVariable:
        """The variable of whether any of these tags passes demand on: their logical or.

        passes: as in `_add_block`.
        known: variables of the block that were made before; equal demands share one.
        """
        if when not in known:
            variables = [passes[i] for i in sorted(when) if passes[i] is not None]
            if len(variables) == 1:
                known[when] = variables[0]
            else:
                known[when] = either = self._variable(high=1.0 if variables else 0.0)
                for v in variables:
                    self._add(either >= v)
                if variables:
                    self._add(either <= pulp.lpSum(variables))
        return known[when]

    def _variable(
        self, *, low: float = 0.0, high: float | None = 1.0, binary: bool = False
    ) -> pulp.LpVariable:
        self._count += 1
        category = pulp.LpBinary if binary else pulp.LpContinuous
        return self.problem.add_variable(f"v{self._count}", low, high, cat=category)

    def _add(self, constraint) -> None:
        self.problem += constraint


def _sum(terms) -> pulp.LpAffineExpression:
    """The sum of coefficient × variable over `terms`, without those that are 0."""
    return pulp.lpSum(c * v for c, v in terms if c)
