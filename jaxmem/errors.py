"""The errors that jaxmem raises, and its warning class.

Each error message names the failed operation, the value received, the value expected and a remedy.
"""


class JaxmemError(ValueError):
    """Base class of all errors that jaxmem raises deliberately."""


class BudgetError(JaxmemError):
    """Raised if a byte budget cannot be read, or if no plan fits the budget.

    least_bytes: the bytes of the smallest step that jaxmem compiled. If the step's arguments alone
      exceed the budget, jaxmem compiles nothing, and `least_bytes` is the bytes of the arguments.
      Every plan needs more bytes. If the plan places model states, `least_bytes` is the least
      expected bytes. None if the budget cannot be read, or if no plan meets `host_budget`.
    least_budget: the least budget that has room for `least_bytes`. It is larger on GPUs and TPUs,
      where a share of the budget is left for what the device takes beside a step's buffers. None if
      it is not known.
    """

    def __init__(
        self, message: str, least_bytes: int | None = None, least_budget: int | None = None
    ):
        super().__init__(message)
        self.least_bytes, self.least_budget = least_bytes, least_budget


class TargetError(JaxmemError):
    """Raised for an unknown target, or for a target that this machine cannot compile for."""


class TagError(JaxmemError):
    """Raised for an invalid tag, kind, codec, policy or assignment."""


class StepError(JaxmemError):
    """Raised for a step that cannot be planned, and for invalid arguments of planning.

    For example, the step has no block, or the step cannot be traced.
    """


class NoLayersError(StepError):
    """Raised if `jaxmem.auto` finds no layer in a loss or a step; the message names the loops that
    were examined.
    """


class StackError(JaxmemError):
    """Raised for layers that cannot run as one loop; the message names the argument.

    The arrays of the layers differ, or the layers return arrays of other shapes or dtypes.
    """


class OptimizerError(JaxmemError):
    """Raised for an invalid optimizer or released step; the message names the argument."""


class PlanFileError(JaxmemError):
    """Raised for a plan's or a run's file that cannot be used; the message names the field.

    The file is broken, has another schema, or belongs to another model.
    """


class RunError(JaxmemError):
    """Raised if a run's folder cannot be used.

    The folder holds another run, another process writes to the folder, or the folder cannot be
    written.
    """


class NotFiniteError(RunError):
    """Raised if the loss or the gradient norm of several steps in a row is not finite.

    The message names the newest complete checkpoint.
    """


class SolverError(JaxmemError):
    """Raised if the solver received numbers that it cannot use, or returned no assignment."""


class JaxmemWarning(UserWarning):
    """Warns that the program works, but probably not as its author expects.

    jaxmem issues each warning once per call site.
    """
