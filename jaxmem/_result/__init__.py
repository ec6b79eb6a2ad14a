"""What a user gets: plans (`plan`) and explanations of memory (`memory`), as data, text, JSON and
pages.
"""
