"""Makes plans: reads what a user asks, profiles the step, has a plan searched, and tells what was
found. It imports all of these; nothing below the faces imports it.
"""
