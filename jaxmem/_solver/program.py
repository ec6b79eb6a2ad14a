"""A profile as a linear program: binary choices, and what follows from them."""

import dataclasses
import math

import pulp

from jaxmem._core.actions import RECOMPUTE, Actions, Choice
from jaxmem._core.profile import BlockClass
from jaxmem._solver.cost import Cost, option_of
from jaxmem._solver.demand import ALWAYS, Demand, When, demand_of
from jaxmem._solver.problem import Problem
from jaxmem.errors import SolverError

RECOMPUTE_PRICE = 1.001  # a hair above its time, or recomputing to hide a transfer would look free
MOST_UNITS = 1_000_000  # of bytes in a limit, at most
TIE = 1e-7  # weight of all bytes against all seconds, and the reverse: breaks ties only

Choices = dict[tuple[str, str], tuple[Choice, ...]]


@dataclasses.dataclass(frozen=True)
class Scale:
    """Units (bytes, seconds) in which a whole step comes to 10⁴ and 10⁵: about MiB and µs, whatever
    the step.
    """

    bytes: float
    seconds: float

    @staticmethod
    def of(problem: Problem, choices: Choices) -> "Scale":
        profile, size, seconds = problem.profile, 0.0, 0.0
        for b in profile.blocks:
            options = [
                [o for o in t.options if o.choice in choices[b.name, t.name]] for t in b.tags
            ]
            device, host, keeping = (
                _most(options, what) for what in ("device_bytes", "host_bytes", "seconds")
            )
            transfer = 2 * host / profile.link_bytes_per_second if host else 0.0
            recompute = sum(e.seconds for e in b.equations)
            size += b.layers * (device + host + sum(b.values[v] for v in b.inputs))
            seconds += b.runs * (recompute + keeping + sum(b.input_seconds) + transfer)
        for key, open_ in choices.items():
            size += max((abs(problem.working.get((*key, c), 0.0)) for c in open_), default=0)
        return Scale((size or 1.0) / 1e4, (seconds or 1.0) / 1e5)


def _most(options, what: str) -> float:
    return sum(max((getattr(o, what) for o in tag), default=0) for tag in options)


class Program:
    """The mixed-integer program of a profile; only the choices are binary, the rest is integral
    once they are.
    """

    def __init__(self, problem: Problem, choices: Choices, scale: Scale):
        self.problem = pulp.LpProblem("plan", pulp.LpMinimize)
        self._scale, self._profile = scale, problem.profile
        self._count = 0
        # PuLP takes an expression of constants alone for no constraint: this variable is always 1
        self._one = self._variable(low=1.0)
        self._pick = {
            (*key, c): self._variable(binary=True) for key, open_ in choices.items() for c in open_
        }
        self._choices = choices
        self._saved, self._host = [], []  # (bytes, variable)
        self._recompute, self._other = [], []  # (scaled seconds, variable)
        self._working = [
            (size, self._pick[key]) for key, size in problem.working.items() if key in self._pick
        ]
        for key, open_ in choices.items():
            self._add(pulp.lpSum(self._pick[*key, c] for c in open_) == 1)
        demanded: dict[tuple[str, str], list] = {key: [] for key in choices}
        for block in problem.profile.blocks:
            self._add_block(block, demand_of(block), demanded)
        for key, when in demanded.items():
            # `in` would compare variables, which makes a constraint in PuLP 3
            # an action that would do nothing is not taken
            if not any(w is self._one for w in when):
                stored = pulp.lpSum(self._pick[*key, c] for c in choices[key] if c != RECOMPUTE)
                self._add(stored <= pulp.lpSum(when))
        self._bytes = _sum((size / scale.bytes, v) for size, v in self._saved + self._working)
        self._seconds = _sum([(RECOMPUTE_PRICE * c, v) for c, v in self._recompute] + self._other)

    def limit(self, room: int | None, host_room: int | None, *, strict: bool = False) -> None:
        """Bytes at most `room` and `host_room`. `strict` rounds sizes up: every remaining
        assignment fits, but some that fit are lost. Otherwise sizes are rounded down: none that
        fits is lost, but some that remain may not fit.
        """
        if room is not None:
            self._limit(self._saved + self._working, room, strict)
        if host_room is not None:
            self._limit(self._host, host_room, strict)

    def minimise(self, goal: str) -> None:
        """`goal`: "time" or "bytes", the other one breaking ties."""
        if goal == "time":
            self.problem += self._seconds + self._bytes * (10 * TIE)
        else:
            self.problem += self._bytes * 10.0 + self._seconds * TIE

    def refuse(self, actions: Actions) -> None:
        """Excludes one assignment that `effective` returned."""
        chosen = {(label, tag, c) for label, tags in actions.items() for tag, c in tags.items()}
        picked = [variable for key, variable in self._pick.items() if key in chosen]
        if len(picked) == len(self._choices) > 0:  # else a choice that is not open: never found
            self._add(pulp.lpSum(picked) <= len(picked) - 1)

    def actions(self) -> Actions:
        result: Actions = {b.name: {} for b in self._profile.blocks}
        for (label, name), open_ in self._choices.items():
            result[label][name] = max(
                open_, key=lambda c: self._pick[label, name, c].varValue or 0.0
            )
        return result

    def agree(self, cost: Cost) -> None:
        """Raises SolverError unless the program's own sums, minimised for time, are those of the
        graph.
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
        label, run, layers = block.name, block.runs / self._scale.seconds, block.layers
        passes: list = []  # by tag: demanded, and recomputed
        known: dict[When, pulp.LpVariable] = {ALWAYS: self._one}
        transfer = []
        for tag, when in demand.tags:
            key = (label, tag.name)
            wanted = self._any(when, passes, known)
            demanded[key].append(wanted)
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
        """Transfer costs what the block's own work does not hide, each way."""
        unit, link = self._scale.seconds, self._profile.link_bytes_per_second
        moved = _sum([(size / link / unit, v) for size, v in transfer if size])
        for hidden, work in ((block.forward_seconds, []), (block.backward_seconds, recompute)):
            exposed = self._variable(high=None)
            self._add(exposed >= moved - _sum([(s / unit, v) for s, v in work]) - hidden / unit)
            self._other.append((float(block.runs), exposed))

    def _limit(self, terms: list, most: int, strict: bool) -> None:
        """Sum of `terms` (bytes, variable) <= `most`, in whole units and half a unit away from
        every assignment.

        HiGHS answers wrongly, with or without presolve, where a sum lies within about 1e-8 of its
        limit (seen on 1.15). Rounded down, no assignment that fits is lost; one that does not is
        refused when it is counted exactly.
        """
        whole = math.gcd(*(size for size, _ in terms if isinstance(size, int)))
        unit = max(whole, sum(abs(size) for size, _ in terms) / MOST_UNITS) or 1
        if most < sum(size for size, _ in terms if size > 0):
            rounded = ((-(-size // unit) if strict else size // unit, v) for size, v in terms)
            self._add(_sum(rounded) <= most // unit + 0.5)

    def _any(self, when: When, passes: list, known: dict) -> pulp.LpVariable:
        """Whether any of these tags passes demand on."""
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
    return pulp.lpSum(c * v for c, v in terms if c)
