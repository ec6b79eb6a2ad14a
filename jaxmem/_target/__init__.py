"""The machine that a step is planned for: its rates and limits (`devices`), its compiler on the
device at hand (`compile`) or without the hardware (`deviceless`), the facts of a compiled program
(`compiled`, `hlo`, `buffers`), and the processes that run together (`processes`). A target's name
and traced steps go in; bytes, seconds and executables come out.
"""
