"""Public names about plans, beside `jaxmem.plan` itself: the plan, assignments by hand, budgets and
targets, pages about plans, and the progress of planning.
"""

from jaxmem._cli.progress import progress as progress
from jaxmem._compiled.compiled import compiled_bytes as compiled_bytes
from jaxmem._core.actions import ALL as ALL
from jaxmem._core.actions import LOSSLESS as LOSSLESS
from jaxmem._core.actions import Action as Action
from jaxmem._core.actions import Choice as Choice
from jaxmem._core.assignment import Assignment as Assignment
from jaxmem._core.bytes import parse_budget as parse_budget
from jaxmem._device.target import Target as Target
from jaxmem._hand.estimate import Estimate as Estimate
from jaxmem._hand.estimate import estimate as estimate
from jaxmem._hand.price import price as price
from jaxmem._plan.difference import difference as difference
from jaxmem._plan.plan import Plan as Plan
from jaxmem._plan.timeline import Timeline as Timeline
from jaxmem._report.report import report as report
from jaxmem._xla.options import compiler_options as compiler_options
