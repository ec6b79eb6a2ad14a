"""The search over actions: solves for assignments that may fit, compiles them, corrects the memory
model by the compiled bytes, and solves again.
"""
