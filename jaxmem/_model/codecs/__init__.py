"""Codecs: how a tensor is stored in fewer bytes."""
