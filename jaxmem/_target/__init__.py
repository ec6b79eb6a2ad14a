"""The machine that a step is planned for: its rates and limits (`devices`), its compiler here
(`compile`) or without the hardware (`deviceless`), what a compiled program says (`compiled`,
`hlo`, `buffers`), and the processes that run together (`processes`).
"""
