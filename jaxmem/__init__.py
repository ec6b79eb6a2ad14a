"""Make a JAX training step fit a byte budget at the least cost in time, confirmed by XLA before a step runs."""

from jaxmem._deviceless import quiet_plugin_noise as _quiet_plugin_noise

_quiet_plugin_noise()

from jaxmem import codecs as codecs  # noqa: E402
from jaxmem import ops as ops  # noqa: E402
from jaxmem._errors import BudgetError as BudgetError  # noqa: E402
from jaxmem._errors import JaxmemError as JaxmemError  # noqa: E402
from jaxmem._errors import JaxmemWarning as JaxmemWarning  # noqa: E402
from jaxmem._errors import PlanFileError as PlanFileError  # noqa: E402
from jaxmem._errors import StepError as StepError  # noqa: E402
from jaxmem._errors import TagError as TagError  # noqa: E402
from jaxmem._errors import TargetError as TargetError  # noqa: E402
from jaxmem._loaded import verify as verify  # noqa: E402
from jaxmem._plan import Plan as Plan  # noqa: E402
from jaxmem._planner import plan as plan  # noqa: E402
from jaxmem._policy import remat_policy as remat_policy  # noqa: E402
from jaxmem._residuals import compress_residuals as compress_residuals  # noqa: E402
from jaxmem._tag import tag as tag  # noqa: E402
from jaxmem._target import Target as Target  # noqa: E402
from jaxmem._types import ALL as ALL  # noqa: E402
from jaxmem._types import LOSSLESS as LOSSLESS  # noqa: E402
from jaxmem.ops import softmax as softmax  # noqa: E402
