"""Arrays of a state that share memory with other arrays of the state, so that none of them may be
deleted alone: one array under two names, or several arrays that `jax.device_put` made of one.

Arrays that share memory are recognised by addresses. The alternative is the ids of the objects.
`jax.device_put` to the memory where an array is stored already makes another object of the same
memory, and deleting one of the two objects deletes both.
"""

import collections

import jax


def sharing(tree) -> dict[int, jax.Array]:
    """The arrays of `tree` whose memory another of its leaves has too, by their ids."""
    arrays = [a for a in jax.tree.leaves(tree) if isinstance(a, jax.Array)]
    found = [(a, _buffers(a)) for a in arrays]
    owners = collections.Counter(b for _, buffers in found for b in buffers)
    return {id(a): a for a, buffers in found if any(owners[b] > 1 for b in buffers)}


def delete_unless_in(tree, arrays: dict[int, jax.Array]) -> None:
    """Deletes those of the arrays that `sharing` found whose memory `tree` does not have."""
    if not arrays:
        return
    jax.block_until_ready(tree)
    there = set().union(*(_buffers(a) for a in jax.tree.leaves(tree) if isinstance(a, jax.Array)))
    gone = [a for a in arrays.values() if not _buffers(a) & there]
    for a in gone:
        a.delete()


def _buffers(a: jax.Array) -> set[tuple[int, int]]:
    """Where the parts of an array lie that this process has: devices and addresses."""
    parts = [shard.data for shard in a.addressable_shards] if a.size else []
    return {(next(iter(part.devices())).id, part.unsafe_buffer_pointer()) for part in parts}
