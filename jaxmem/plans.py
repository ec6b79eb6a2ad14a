"""Plans, frontiers over sizes of the batch and budgets, assignments written by hand, estimates,
budgets, targets, and pages about plans.

`jaxmem.plan` makes a plan. `jaxmem.plans.progress` shows the progress of `jaxmem.plan`.
"""

from jaxmem._core.actions import ALL as ALL
from jaxmem._core.actions import LOSSLESS as LOSSLESS
from jaxmem._core.actions import Action as Action
from jaxmem._core.actions import Choice as Choice
from jaxmem._core.assignment import Assignment as Assignment
from jaxmem._core.bytes import parse_budget as parse_budget
from jaxmem._core.progress import progress as progress
from jaxmem._model.tags.policy import install as install
from jaxmem._planner.frontier import frontier as frontier
from jaxmem._planner.user_assignments import Estimate as Estimate
from jaxmem._planner.user_assignments import estimate as estimate
from jaxmem._planner.user_assignments import price as price
from jaxmem._result.frontier import Frontier as Frontier
from jaxmem._result.plan.difference import difference as difference
from jaxmem._result.plan.plan import Plan as Plan
from jaxmem._result.plan.timeline import Timeline as Timeline
from jaxmem._target.compile.options import compiler_options as compiler_options
from jaxmem._target.compiled.compiled import compiled_bytes as compiled_bytes
from jaxmem._target.devices.target import Target as Target
from jaxmem._train.report.report import report as report
from jaxmem._train.report.report import report_frontier as report_frontier
