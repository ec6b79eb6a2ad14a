"""The errors that jaxmem raises, and its warning; `jaxmem.BudgetError`, which a program may want to catch, is here too."""

from jaxmem._errors import BudgetError as BudgetError
from jaxmem._errors import JaxmemError as JaxmemError
from jaxmem._errors import JaxmemWarning as JaxmemWarning
from jaxmem._errors import OptimizerError as OptimizerError
from jaxmem._errors import PlanFileError as PlanFileError
from jaxmem._errors import StackError as StackError
from jaxmem._errors import StepError as StepError
from jaxmem._errors import TagError as TagError
from jaxmem._errors import TargetError as TargetError
