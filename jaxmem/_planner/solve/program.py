"""A profile as a mixed-integer linear program: binary choices, and continuous variables that follow
from the choices.

For each (block label, tag, choice), a binary variable is 1 if the tag takes the choice. All other
variables are continuous: whether a tag is demanded, whether an equation is recomputed, and for how
long transfers are exposed. Once the choices are fixed, the constraints leave each continuous
variable one value, or, if time is minimised, one best value.
"""

import math

import pulp

from jaxmem._core.actions import RECOMPUTE, Actions, Choice
from jaxmem._core.profile import BlockClass
from jaxmem._planner.solve.cost import Cost, option_of
from jaxmem._planner.solve.demand import ALWAYS, Demand, When, demand_of
from jaxmem._planner.solve.problem import ActionProblem, keys_of
from jaxmem.errors import SolverError

# Recomputation is priced slightly above its time. At its exact time, a useless recomputation would
# hide as many seconds of a transfer as it costs, and would seem free.
RECOMPUTE_PRICE = 1.001
MOST_UNITS = 1_000_000  # the most units that the sizes in a limit add up to
# The weight of all bytes relative to all seconds, or the reverse. The second goal only breaks ties.
TIE = 1e-7

Choices = dict[tuple[str, str], tuple[Choice, ...]]


def _units(problem: ActionProblem, choices: Choices) -> tuple[float, float]:
    """The bytes and the seconds of one unit. In these units, the bytes of a whole step are at most
    10⁴, and its seconds at most 10⁵.

    For a common step, the units are about one MiB and one µs. HiGHS's tolerances are absolute, so
    that small and large steps must have numbers of similar size. The step's bytes and seconds are
    bounded by the most expensive open option of every tag, all inputs kept raw, and every equation
    recomputed.
    """
    profile, size, seconds = problem.profile, 0.0, 0.0
    for b in profile.blocks:
        options = [[o for o in t.options if o.choice in choices[b.name, t.name]] for t in b.tags]
        device, host, keeping, doubt = (
            _most(options, what) for what in ("device_bytes", "host_bytes", "seconds", "doubt")
        )
        transfer = 2 * host / profile.link_bytes_per_second if host else 0.0
        recompute = sum(e.seconds for e in b.equations)
        size += b.layers * (device + host + sum(b.values[v] for v in b.inputs)) + b.span_bytes
        seconds += b.runs * (recompute + keeping + doubt + sum(b.input_seconds) + transfer)
        seconds += b.span_seconds
    for key, open_ in choices.items():
        size += max((abs(problem.working.get((*key, c), 0.0)) for c in open_), default=0)
        seconds += max((abs(problem.corrections.get((*key, c), 0.0)) for c in open_), default=0)
    return (size or 1.0) / 1e4, (seconds or 1.0) / 1e5


def _most(options, what: str) -> float:
    """The sum over tags of the largest attribute `what` among each tag's options."""
    return sum(max((getattr(o, what) for o in tag), default=0) for tag in options)


class MixedIntegerProgram:
    """The mixed-integer program of a profile. Only the choices are binary. The variables of demand
    follow from the choices, and are 0 or 1 without an integer constraint.
    """

    def __init__(self, problem: ActionProblem, choices: Choices):
        """Builds the program without limits and goal, which `limit` and `minimise` add.

        problem: the profile, and the working memory of each choice.
        choices: the open choices of each (block label, tag), at least one.
        """
        self.problem = pulp.LpProblem("plan", pulp.LpMinimize)
        self._byte_unit, self._second_unit = _units(problem, choices)
        self._profile = problem.profile
        self._count = 0
        # A variable that is always 1, for values that are demanded under every assignment. PuLP
        # accepts no constraint between constants.
        self._one = self._variable(low=1.0)
        self._pick = {
            (*key, c): self._variable(binary=True) for key, open_ in choices.items() for c in open_
        }
        self._choices = choices
        # Terms of the sums over the whole step; `_add_block` appends to these lists.
        self._saved, self._host = [], []  # (bytes of all layers, variable)
        # (scaled seconds of all runs, variable)
        self._recompute, self._other, self._doubt = [], [], []
        self._working = [
            (size, self._pick[key]) for key, size in problem.working.items() if key in self._pick
        ]
        for key, open_ in choices.items():
            self._add(pulp.lpSum(self._pick[*key, c] for c in open_) == 1)
        # By (label, tag): for each class of the label, the variable that is 1 if the tag is
        # demanded.
        demanded: dict[tuple[str, str], list] = {key: [] for key in choices}
        for block in problem.profile.blocks:
            self._add_block(block, demand_of(block), demanded)
        for key, when in demanded.items():
            # A tag that no class demands is recomputed. Otherwise the program would take an action
            # without effect if the memory model predicts that the action lowers working memory.
            # Remove with PuLP 3: `is`. There `in` compares by `==`, which makes a constraint.
            if not any(w is self._one for w in when):
                stored = pulp.lpSum(self._pick[*key, c] for c in choices[key] if c.action.stores)
                self._add(stored <= pulp.lpSum(when))
        self._bytes = _sum((size / self._byte_unit, v) for size, v in self._saved + self._working)
        self._seconds = _sum([(RECOMPUTE_PRICE * c, v) for c, v in self._recompute] + self._other)
        if problem.most_seconds is not None:
            price = _sum(self._recompute + self._other + self._doubt)
            self._add(price <= problem.most_seconds / self._second_unit * (1 + TIE))
        corrected = (
            (s, self._pick[key]) for key, s in problem.corrections.items() if key in self._pick
        )
        self._risk_adjusted = self._seconds + _sum(self._doubt)
        self._risk_adjusted += _sum((s / self._second_unit, v) for s, v in corrected)

    def limit(self, room: int | None, host_room: int | None, *, strict: bool = False) -> None:
        """Limits bytes to `room` and `host_room`; None means no limit.

        `strict` rounds sizes up: every remaining assignment fits, but some assignments that fit are
        excluded. Otherwise sizes are rounded down: no assignment that fits is excluded, but some
        remaining assignments may not fit.
        """
        if room is not None:
            self._limit(self._saved + self._working, room, strict)
        if host_room is not None:
            self._limit(self._host, host_room, strict)

    def minimise(self, goal: str) -> None:
        """Sets the goal, "time" or "bytes"; the other quantity breaks ties. Time is the time by
        which assignments are ranked, and includes the error bounds of lossy codecs
        (`Cost.risk_adjusted_seconds`).
        """
        # All scaled bytes are a tenth of all scaled seconds (`_units`), hence the factor 10.
        if goal == "time":
            self.problem += self._risk_adjusted + self._bytes * (10 * TIE)
        else:
            self.problem += self._bytes * 10.0 + self._risk_adjusted * TIE

    def refuse(self, actions: Actions) -> None:
        """Excludes an assignment that `effective` returned: at least one tag must take another
        choice.
        """
        chosen = set(keys_of(actions))
        picked = [variable for key, variable in self._pick.items() if key in chosen]
        # If a choice of the assignment is not open, the program cannot return the assignment.
        if len(picked) == len(self._choices) > 0:
            self._add(pulp.lpSum(picked) <= len(picked) - 1)

    def actions(self) -> Actions:
        """The assignment of the solution. HiGHS may return 0.9999999 for a binary variable, hence
        the maximum.
        """
        result: Actions = self._profile.everything_recomputed
        for (label, name), open_ in self._choices.items():
            result[label][name] = max(
                open_, key=lambda c: self._pick[label, name, c].varValue or 0.0
            )
        return result

    def agree(self, cost: Cost) -> None:
        """Raises SolverError unless the program's sums, minimised for time, equal the price on the
        graph, within 1e-5 of the whole step.

        cost: the price of the solution's assignment, by `evaluate`.
        """
        seconds = cost.seconds + (RECOMPUTE_PRICE - 1) * cost.recompute_seconds
        for what, got, expected, unit, tolerance in (
            ("seconds", self._seconds, seconds, self._second_unit, self._second_unit),
            ("bytes", _sum(self._saved), cost.saved_bytes, 1.0, 0.1 * self._byte_unit),
            ("host bytes", _sum(self._host), cost.host_bytes, 1.0, 0.1 * self._byte_unit),
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
        demand: the class's graph, reduced to tags.
        demanded: lists of variables, by (label, tag). The variable of each tag's demand is appended
          to the tag's list.
        """
        # `run` converts seconds of one run to scaled seconds of the step.
        label, run, layers = block.name, block.runs / self._second_unit, block.layers
        # By position in `demand.tags`: the variable of "demanded and recomputed", which passes
        # demand on to the values before the tag; None if the tag may not be recomputed. A tag is
        # listed after the tags that pass demand on to it. So the loop meets a tag after it has
        # appended the variables of these tags.
        passes: list = []
        known: dict[When, pulp.LpVariable] = {ALWAYS: self._one}
        transfer = []  # (bytes of one run, variable)
        for tag, when in demand.tags:
            key = (label, tag.name)
            wanted = self._any(when, passes, known)
            demanded[key].append(wanted)
            # `effective` has a variable for each choice, which is 1 if the choice takes effect: the
            # tag takes the choice, and is demanded. It is the product of the two variables. The
            # product is linear, since the tag takes exactly one choice.
            effective = {c: self._pick[*key, c] for c in self._choices[key]}
            if when != ALWAYS:
                picked, effective = effective, {c: self._variable() for c in effective}
                self._add(pulp.lpSum(effective.values()) == wanted)
                for c, variable in effective.items():
                    self._add(variable <= picked[c])
            passes.append(effective.get(RECOMPUTE))
            for choice, variable in effective.items():
                if choice.action.stores:
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
        if block.span_bytes or block.span_seconds:  # whatever the choices
            self._saved.append((block.span_bytes, self._one))
            self._recompute.append((block.span_seconds / self._second_unit, self._one))

    def _expose(self, block: BlockClass, transfer, recompute) -> None:
        """Prices, for each direction, the seconds of transfers that the block's own work does not
        hide.

        A share `overlap` of the forward's work hides its transfers. In the backward, the same share
        of recomputation hides transfers too.
        `exposed` has only a lower bound, the excess (or 0): minimising time makes it tight.
        """
        unit, link = self._second_unit, self._profile.link_bytes_per_second
        overlap = self._profile.overlap
        moved = _sum([(size / link / unit, v) for size, v in transfer if size])
        there, back = (
            (1, block.forward_seconds, []),
            (block.backwards, block.backward_seconds, recompute),
        )
        for times, hidden, work in (there, back):
            exposed = self._variable(high=None)  # scaled seconds of one run
            worked = _sum([(overlap * s / unit, v) for s, v in work]) + overlap * hidden / unit
            self._add(exposed >= times * moved - worked)
            self._other.append((float(block.runs), exposed))

    def _limit(self, terms: list, most: int, strict: bool) -> None:
        """Limits the sum of `terms` (bytes, variable) to `most`, in whole units and half a unit
        away from every assignment.

        HiGHS returns wrong solutions, with or without presolve, if a sum is within about 1e-8 of
        its limit (seen on 1.15). With sizes rounded down, no assignment that fits is excluded. An
        assignment that does not fit is refused when its exact bytes are counted.
        """
        # Units of the gcd of whole sizes count these sizes exactly. If that would take too many
        # units, units are larger, and sizes are rounded.
        gcd = math.gcd(*(size for size, _ in terms if isinstance(size, int)))
        unit = max(gcd, sum(abs(size) for size, _ in terms) / MOST_UNITS) or 1
        if most < sum(size for size, _ in terms if size > 0):  # else every assignment fits
            rounded = ((-(-size // unit) if strict else size // unit, v) for size, v in terms)
            self._add(_sum(rounded) <= most // unit + 0.5)

    def _any(self, when: When, passes: list, known: dict) -> pulp.LpVariable:
        """The variable that is 1 if any of these tags passes demand on: their logical or.

        passes: as in `_add_block`.
        known: the block's variables by condition; equal conditions share a variable.
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
    """The sum of coefficient × variable over `terms`, without terms whose coefficient is 0."""
    return pulp.lpSum(c * v for c, v in terms if c)
