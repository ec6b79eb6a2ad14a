"""Texts, images and GLUE tasks as arrays. Imports `config` and `errors`."""
