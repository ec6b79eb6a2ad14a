"""What a user of jaxmem would copy: models, data, a training loop. Imports only jaxmem's public
names.
"""
