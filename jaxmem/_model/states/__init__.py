"""Where parameters and optimizer states are stored while a step runs: on the device, in host
memory, or divided over devices.
"""
