"""Policies that `jax.checkpoint_policies.save_from_both_policies` combines with each other.

JAX's function returns a closure over both policies. The closure saves a value if either policy
saves the value, and raises an error for an answer other than True and False. A plan also answers
how a tensor is compressed or offloaded. Therefore the tag's rule calls the two policies, and not
the closure. A value that the other policy saves is saved as it is, whatever the plan's choice. The
alternative, that the plan's choice wins, would change the meaning of JAX's function: a library
combines policies so that a value is saved in any case.
"""

from typing import Any

import jax

# Remove with a public name: JAX 0.10 to 0.12 exports none for the closure. Its cells are the two
# policies. JAX 0.12 returns one of the two if the other is `nothing_saveable`, and returns
# `everything_saveable` if either policy is: then there is no closure.
_CLOSURE: Any = jax.checkpoint_policies.save_from_both_policies(lambda *_: True, lambda *_: True)


def parts(policy) -> list:
    """Returns the policies that `policy` combines, in order and without repetitions. A policy that
    is no combination is its own single part.
    """
    if getattr(policy, "__code__", None) is not _CLOSURE.__code__:
        return [policy]
    found = [part for cell in policy.__closure__ for part in parts(cell.cell_contents)]
    return [part for i, part in enumerate(found) if part not in found[:i]]


def answer(policy, primitive, *avals, **params) -> Any:
    """Returns a policy's answer for an operation. The answer of a combination is True if one of its
    policies answers True, else the answer of the jaxmem policy if it compresses or offloads.
    """
    answers = [part(primitive, *avals, **params) for part in parts(policy)]
    if len(answers) > 1 and any(each is True for each in answers):
        return True
    return next((each for each in answers if each is not False), False)
