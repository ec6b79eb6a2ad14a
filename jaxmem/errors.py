"""The errors that jaxmem raises, and its warning.

Each message says what failed, what was got, what was expected and what to do.
"""


class JaxmemError(ValueError):
    """Base of every error that jaxmem raises on purpose."""


class BudgetError(JaxmemError):
    """A byte budget that cannot be read, or that no plan meets.

    `least_bytes` is the least total that compiled. Where the step's arguments alone exceed the
    budget nothing is compiled, and it is their bytes, of which every plan takes more. It is None
    where the budget could not be read.
    """

    def __init__(self, message: str, least_bytes: int | None = None):
        super().__init__(message)
        self.least_bytes = least_bytes


class TargetError(JaxmemError):
    """An unknown target, or one that cannot be compiled for here."""


class TagError(JaxmemError):
    """A tag, codec or policy that cannot mean what was asked."""


class StepError(JaxmemError):
    """A training step that cannot be planned: it has no block, or cannot be traced."""


class StackError(JaxmemError):
    """Layers that cannot run as one loop: their arrays or what they return differ; names the
    argument.
    """


class OptimizerError(JaxmemError):
    """An optimizer, or a step made of one, that cannot mean what was asked; names the argument."""


class PlanFileError(JaxmemError):
    """A plan file that is broken, of another schema, or made for another model; names the field."""


class RunError(JaxmemError):
    """A run's folder that holds another run, that another process writes to, or that cannot be
    written.
    """


class NotFiniteError(RunError):
    """A loss or the norm of a gradient that is not finite, step after step; names the newest
    checkpoint.
    """


class SolverError(JaxmemError):
    """The solver was given numbers it cannot use, or returned nothing."""


class JaxmemWarning(UserWarning):
    """The program works, but probably not as its author expects. Issued once per call site."""
