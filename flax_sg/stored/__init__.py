"""Rows of a whole data set: what a function makes of its examples, kept in files."""

from flax_sg.stored.rows import Rows as Rows
from flax_sg.stored.storing import store as store
