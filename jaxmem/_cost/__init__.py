"""What each action costs: the blocks of a traced step (`blocks`), and the bytes and seconds of each
action on each of their tensors (`profile`).
"""
