"""`jaxmem.auto`: finds the layers of a function that has no tags, and makes each layer a block."""
