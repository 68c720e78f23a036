"""Pytrees by path: leaves, parts, absent leaves, what is trainable."""
