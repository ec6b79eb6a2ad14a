"""The `jaxmem` command."""
