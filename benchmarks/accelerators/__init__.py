"""Programs for accelerators that are not there, made by their own compilers."""
