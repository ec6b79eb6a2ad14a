"""The search that joins profile, solver and compiler. It imports all of these; nothing below the
faces imports it.
"""
