"""Wraps every private name of Flax and JAX that the library uses, by topic.

One function or constant wraps each name, and says why it is needed. Tested with flax
0.12.0 and jax 0.7.2 up to flax 0.12.12 and jax 0.12.0.1.

===============  ====================================================================
file             contents
===============  ====================================================================
``modules``      the state of a module, the stack of running methods, clones
``core_scopes``  the variables of a scope, copies of scopes
``lifting``      ``nn.scan``, ``nn.vmap``, ``nn.jit``: names, axes, order of variables
``patching``      the functions of Flax and JAX that the import replaces
``tracing``      the traces of a tracer, the keys of JAX's caches
``jaxprs``       equations and their parameters
``partial_eval`` JAX's partial evaluation of a program
``types``        names for types that Python cannot check
``frames``       frames of the Python stack, and which are the user's
``places``       the line, the thread and the asyncio task of a call
``required``     import-time checks of the private names that gradients depend on
``versions``     supported versions, and the error for others
``optional``     packages that only some features need
``weak``         tables by identity, which keep nothing alive
``initializing`` the shapes of the variables of a linen module
===============  ====================================================================
"""

from flax_sg.internals import versions

try:
    from flax_sg.internals import required
# A private name is missing. Tests of that run in a process of their own.
except (ImportError, AttributeError) as error:  # pragma: no cover
    raise versions.unsupported([str(error)]) from error

versions.check(required.PROGRAMS)
