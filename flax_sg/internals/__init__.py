"""Everything private of Flax and JAX, by topic.

Each name stands behind one function or constant that says why it is needed. Tried with
flax 0.12.0 and jax 0.7.2 up to flax 0.12.12 and jax 0.12.0.1.

===============  ====================================================================
file             private names for
===============  ====================================================================
``modules``      the state of a module, the stack of running methods, clones
``core_scopes``  the variables of a scope, copies of scopes
``lifting``      ``nn.scan``, ``nn.vmap``, ``nn.jit``: names, axes, order of variables
``hooking``      the functions of Flax and JAX that are replaced while a block is open
``tracing``      the traces around a tracer, the keys of JAX's caches
``jaxprs``       equations, their parameters and places in the source
``tables``       ``nn.tabulate``
``frames``       frames of the stack: which are the user's
``places``       the line, the thread and the asyncio task of a call
``required``     what gradients depend on in all of these: the import checks it
``versions``     what is said of other versions
``optional``     packages that only some features need
===============  ====================================================================
"""

from flax_sg.internals import versions

try:
    from flax_sg.internals import required
except (ImportError, AttributeError) as error:  # A name that is gone.
    raise versions.unsupported([str(error)]) from error

versions.check(required.PROGRAMS)
