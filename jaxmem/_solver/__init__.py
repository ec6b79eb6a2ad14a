"""From a profile and limits to the fastest assignment of actions. Free of JAX; imports `_core`."""
