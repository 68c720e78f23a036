"""Analysis of programs: what primitives do, a program as steps, and its two halves.

===============  ====================================================================
file             contents
===============  ====================================================================
``primitives``   the table of JAX's primitives: what each does
``bodies``       the jaxprs that an equation runs, and how their inputs are its own
``sources``      the lines of the user that made an equation, and what it does in words
``steps``        a program as a list of steps, each in its site
``equal``        which equations compute the same
``halves``       an equation in two: what does not change, and the rest
``callbacks``    the functions of Python that a program calls, to compare them
===============  ====================================================================
"""
