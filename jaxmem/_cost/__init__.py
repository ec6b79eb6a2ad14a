"""Prices the actions of a step. A traced step goes in. Its blocks are found (`blocks`), and a
`Profile` comes out: the bytes and the seconds of each action on each tensor (`profile`).
"""
