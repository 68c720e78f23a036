"""Open blocks, and Flax's reads while one is open: see the README beside this file."""
