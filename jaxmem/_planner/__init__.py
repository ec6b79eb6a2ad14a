"""The search that joins profile, solver and compiler. Imports all of these; nothing below the faces
imports it.
"""
