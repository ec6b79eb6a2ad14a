"""What each command of `jaxmem` does. May import every other package."""
