"""Programs for accelerators, there or not, made by their own compilers."""
