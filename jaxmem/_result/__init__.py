"""The results that a user gets: plans (`plan`), plans over sizes and budgets (`frontier.py`), and
explanations of memory (`memory`). The planner creates them; data, text, JSON and HTML come out.
"""
