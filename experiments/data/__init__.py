"""Texts, images and GLUE tasks as arrays. Imports `config` and `errors`.

A batch is a function of the seed and of the step's number. So a run resumes with another number of
processes, and each process computes its own rows. The alternative is grain, whose iterators
`jaxmem.runs.train` takes too (`tests/stacks/test_grain.py`): an iterator's position belongs to one
process, and holds for as many processes as there were.
"""
