"""Example code for users of jaxmem to copy: models, data, a training loop. Imports only jaxmem's
public names.
"""
