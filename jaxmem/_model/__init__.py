"""Carries out a plan inside a user's program: tags and policies (`tags`), codecs (`codecs`), the
loop over layers (`loop`), the layers of a program without tags (`layer`, `auto`), and the memories
of model states (`states`). A plan and the user's functions go in; functions that store and
recompute tensors by the plan come out.
"""
