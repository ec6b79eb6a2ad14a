"""From a traced step to its profile. Imports `_core`, `_jax`, `_device`, `_codecs`, `_tags`."""
