"""orbax.checkpoint, which may be missing."""

from jaxmem.errors import RunError


def orbax():
    """orbax.checkpoint. Raises RunError with the command that installs it where it is missing."""
    try:
        import orbax.checkpoint
    except ImportError as error:
        raise RunError(
            f"checkpoints are written by orbax, which cannot be imported ({error}), and processes"
            " reach one another by way of it; install it: pip install jaxmem[runs]"
        ) from error
    return orbax.checkpoint
