"""The orders in which XLA's schedulers would run kernels.

XLA computes several orders, and takes the order whose program needs the least memory. `ORDERS` are
XLA's depth-first orders. A third scheduler of XLA always runs the kernel next that frees the most
memory. Its order is close to the program's own order if the latter is good.
"""

from collections import Counter
from collections.abc import Callable, Sequence

from jaxmem._core.lists import reached
from jaxmem._trace.arguments import on_host
from jaxmem._trace.liveness.kernels import Body, device_bytes

Key = Callable[[int], tuple]
NUMBERS = 1024  # the largest bytes of a counter or a size; larger values are tensors


def as_written(body: Body, size: Callable[[int], int]) -> list[int]:
    """Positions of kernels in the program's own order."""
    return list(range(len(body.kernels)))


def post_order(body: Body, size: Callable[[int], int]) -> list[int]:
    """Positions of kernels, depth first from the outputs: each kernel follows its operands."""
    return _depth_first(_operands(body), _roots(body))


def by_users(body: Body, size: Callable[[int], int]) -> list[int]:
    """Positions of kernels, depth first from the outputs. Of the operands of a kernel, the operand
    with the most readers comes first, then the operand that depends on the most bytes.

    size: returns the bytes of a value.
    """
    operands = _operands(body)
    readers = Counter(j for those in operands for j in those)
    users, bytes_before = [0] * len(operands), [0] * len(operands)
    for i, kernel in enumerate(body.kernels):
        users[i] = max(0, readers[i] - 1) + sum(users[j] for j in operands[i])
        own = sum(map(size, kernel.writes))
        bytes_before[i] = own + sum(bytes_before[j] for j in operands[i])
    key: Key = lambda i: (-users[i], -bytes_before[i], i)
    ordered = [sorted(those, key=key) for those in operands]
    return _depth_first(ordered, sorted(set(_roots(body)), key=key))


ORDERS = (post_order, by_users)


def with_fetches_first(body: Body, order: Sequence[int]) -> list[int]:
    """The order with copies out of host memory first, each after its operands. XLA's
    latency-hiding scheduler starts these copies early, so that they overlap with most work.

    A copy that depends on work, such as a copy behind a barrier, keeps its position.

    order: positions of kernels.
    """
    avals, operands = body.avals, _operands(body)
    size = lambda i: sum(device_bytes(avals[v]) for v in body.kernels[i].writes)
    hosted = [any(on_host(avals[v]) for v in k.reads) for k in body.kernels]
    early = [False] * len(operands)
    for i, kernel in enumerate(body.kernels):
        light = hosted[i] or size(i) <= NUMBERS
        early[i] = light and kernel.eqn is not None and all(early[j] for j in operands[i])
    fetched = [i for i in order if hosted[i] and early[i] and size(i)]
    early_work = reached(fetched, lambda i: operands[i])
    first = _depth_first(operands, fetched)[: len(early_work)]
    return first + [i for i in order if i not in set(first)]


def _operands(body: Body) -> list[list[int]]:
    """By kernel: the kernels that make its operands, in the program's order."""
    made_by = {v: i for i, k in enumerate(body.kernels) for v in k.writes}
    return [sorted({made_by[v] for v in k.reads if v in made_by}) for k in body.kernels]


def _roots(body: Body) -> list[int]:
    """The kernels that write the program's outputs, one kernel for each output. Outputs that no
    kernel writes, such as inputs that are returned unchanged, are left out.
    """
    made_by = {v: i for i, k in enumerate(body.kernels) for v in k.writes}
    return [made_by[v] for v in body.outputs if v in made_by]


def _depth_first(operands: Sequence[Sequence[int]], roots: Sequence[int]) -> list[int]:
    """Every kernel after its operands. A stack in place of recursion: a step without a loop has
    chains of thousands.
    """
    seen, order = [False] * len(operands), []
    for root in (*roots, *range(len(operands))):
        todo = [(root, False)]
        while todo:
            i, is_last = todo.pop()
            if is_last:
                order.append(i)
            elif not seen[i]:
                seen[i] = True
                todo.append((i, True))
                todo += [(j, False) for j in reversed(operands[i]) if not seen[j]]
    return order
