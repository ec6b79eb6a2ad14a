"""What a user gets: plans (`plan`), plans over sizes and budgets (`frontier.py`), and explanations
of memory (`memory`), as data, text, JSON and pages.
"""
