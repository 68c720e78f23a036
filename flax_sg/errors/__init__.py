"""Every exception of the library, each with programs that fail and their fixes.

Each class is a :class:`FlaxSGError` and also the built-in exception that a reader
would expect, so ``except ValueError`` works as well as ``except FlaxSGError``.
"""

from __future__ import annotations


class FlaxSGError(Exception):
    """Base of every exception that flax_sg raises."""


class UnsupportedVersionError(FlaxSGError, ImportError):
    """Flax or JAX lack a name that the library needs, or it means something else.

    Raised by the import, with the versions that are supported; and by
    ``importlib.reload`` of a module that holds the open blocks.
    """


class FilterTypeError(FlaxSGError, TypeError):
    """A filter is expected, and something else was given.

    A filter says *which variables*; a module, an array or a value cannot::

        nn.stop_gradient(self.encoder)  # raises: a module says no paths

        with nn.stop_gradient('encoder/**'):  # right
            y = self.encoder(x)

    Also raised when a predicate returns anything but a bool, or reads a traced value::

        nn.stop_gradient(lambda path: re.match('gln', path))  # a Match, or None
        nn.stop_gradient(lambda path: path.startswith('gln'))  # a bool
    """


class UnusedFilterError(FlaxSGError, ValueError):
    """A filter, or one of its patterns, selected no variable.

    Such a program looks frozen and is not::

        with nn.stop_gradient('params/gln/**'):  # raises: paths start below 'params'
            y = self.gln(x)

        with nn.stop_gradient('gln/**'):  # right
            y = self.gln(x)

    The message shows the pattern, how many variables were looked at, the nearest
    paths, and what was meant if a name is misspelled. It is raised too for a
    collection that does not exist, for a value of ``substitute`` or a bool that belongs
    to no variable, and for a block at top level in which no variable was read::

        grads = vjp_fn(ct)                      # made by jax.vjp before the block
        with nn.stop_gradient('encoder/**'):    # wrong: nothing is read in here
            grads = vjp_fn(ct)

        with nn.stop_gradient('encoder/**'):    # right
            y, vjp_fn = jax.vjp(loss, params)

    Where an empty selection is fine, say so with ``unused='ignore'``.

    Args:
        problem: what matches nothing.
        advice: what was meant, perhaps.
        otherwise: what to write if it may match nothing.
    """

    def __init__(self, problem: str, advice: str = '', otherwise: str = '') -> None:
        super().__init__(problem, advice, otherwise)

    def __str__(self) -> str:
        return '\n'.join(filter(None, self.args))


class ArgumentTypeError(FlaxSGError, TypeError):
    """A function of the library was given something of the wrong kind.

    ::

        nn.Frozen(params)                                # wrong: a tree
        sg.stop_gradient(params, 'encoder/**')

        sg.tabulate(nn.Dense, x)                         # wrong: a class
        sg.tabulate(nn.Dense(4), x)

    Also raised if what was selected by name cannot be differentiated. Only real and
    complex arrays and numbers have a gradient::

        params = {'w': jnp.ones(3), 'step': jnp.array(3)}
        sg.grad(loss, wrt='step')(params)  # raises: an integer
        sg.grad(loss, wrt=True)(params)  # takes 'w' alone
    """


class ArgumentValueError(FlaxSGError, ValueError):
    """An argument has the right type and a value that can mean nothing.

    ::

        nn.stop_gradient('a/**', levels=2)  # wrong: all levels, or the innermost one
        nn.stop_gradient('a/**', levels=1)

    A glob describes whole path components::

        nn.stop_gradient('gln/')  # raises: no path ends in '/'
        nn.stop_gradient('gln**')  # raises: '**' stands alone between slashes
        nn.stop_gradient('gln*/**')  # everything inside gln, gln_0, gln2, ...

    A tree of bools has to answer for every variable::

        nn.stop_gradient({'gln': True})  # raises if there is also a 'dec'
        nn.stop_gradient({'gln': True, 'dec': False})

    Also raised when a ``NonDifferentiable`` is read that an optimizer has changed::

        params = {'w': jnp.ones(3), 'n': sg.NonDifferentiable(100)}
        tx = optax.adamw(1e-3)  # wrong: decays every parameter
        tx = sg.freeze(optax.adamw(1e-3))  # skips it
    """


class UnknownNameError(FlaxSGError, LookupError):
    """An output, a parameter or a leaf is named that does not exist.

    ::

        report = sg.gradient_flow(losses, params)
        report.status_of('los', 'kernel')  # wrong: the output is called 'loss'
        report.status_of('loss', 'kernel')
    """


class BlockError(FlaxSGError, RuntimeError):
    """A block cannot do what it is asked for.

    Blocks close in the thread and task that opened them, the last one first::

        a.__enter__(); b.__enter__(); a.__exit__(None, None, None)  # wrong
        with a, b: ...

    A task that is suspended inside a block leaves it open for all other tasks::

        async def evaluate():
            with nn.stop_gradient('encoder/**'):
                await queue.get()              # wrong

        async def evaluate():
            await queue.get()
            with nn.stop_gradient('encoder/**'):
                y = model.apply(variables, x)

    The backward rule of a ``jax.custom_vjp`` runs after its block has closed. A
    variable that it reads, and that two blocks see differently, has to be read in the
    function too.

    Under ``read_only``, a write raises::

        with nn.read_only('**', collections='batch_stats'):
            y = self.norm(x, use_running_average=False)  # raises
            y = self.norm(x, use_running_average=True)

    ``self.w2 = f(self.w)`` in ``setup`` is no read of a variable when a method uses
    it, so ``setup`` runs again under the block. An error says where this run may differ
    from the first one::

        def setup(self):
            noise = jax.random.normal(self.make_rng('noise'))
            self.w2 = self.param('w', init) + noise

        def __call__(self, x):
            x = x + jax.random.normal(self.make_rng('noise'))
            with nn.stop_gradient('w'):
                return x * self.w2  # raises

    Compute the value in the method, under the block.
    """


class CotangentError(FlaxSGError, TypeError):
    """A rule for cotangents cannot be applied.

    Its function returned another shape, or the selected leaf has no cotangent::

        nn.map_cotangent('w', lambda path, ct: ct.sum())  # raises: another shape
        nn.map_cotangent('w', lambda path, ct: ct / ct.size)
    """


class AbsentLeafError(FlaxSGError, AttributeError, TypeError):
    """A leaf was used that is not in this part of the tree.

    It was not selected, so nothing was computed for it::

        grads = sg.grad(loss, wrt='head/**')(params)
        grads['backbone']['w'] + 1.0  # raises

    Select it, or ask for zeros in its place::

        sg.grad(loss, wrt=['head/**', 'backbone/w'])(params)
        sg.grad(loss, wrt='head/**', absent='zeros')(params)
    """


class StructureError(FlaxSGError, ValueError):
    """Trees or values that belong together do not fit.

    They differ in structure, shape or dtype, a leaf is in two parts, or it is missing::

        head, rest = sg.partition(params, 'head/**')
        sg.combine(head, params)  # raises: two parts have the head
        sg.combine(head, rest)
    """


class PartError(FlaxSGError, IndexError):
    """A part of an array is meant, or some layers of a scan, that do not exist.

    ::

        sg.freeze(tx, sg.at('embed/embedding', np.s_[:100]))  # raises for 50 rows
        nn.scan(Layer, length=4, frozen_layers=[7])  # raises
    """


class StaleRowsError(FlaxSGError, ValueError):
    """A folder of ``sg.store`` holds other rows than the function makes now.

    Weights, code, data or ``batch_size`` have changed::

        rows = sg.store(early, (x, y), 'features', batch_size=256)
        # ... the backbone is trained for another epoch ...
        rows = sg.store(early, (x, y), 'features', batch_size=256)  # raises
        rows = sg.store(early, (x, y), 'features_2', batch_size=256)
    """


class MissingRowsError(FlaxSGError, FileNotFoundError):
    """Rows are read that are not in their folder, or not yet.

    ``sg.store`` computes what is missing::

        rows = sg.Rows('features')
        rows[:]  # raises if a file was deleted, or cut off by a copy
        rows = sg.store(early, (x, y), 'features', batch_size=256)
    """


class ExpectationError(FlaxSGError, AssertionError):
    """An assertion of :mod:`flax_sg.testing` does not hold.

    ::

        def loss(params, x):
            with nn.stop_gradient('encoder/**'):
                return jnp.mean(model.apply({'params': params}, x) ** 2)

        assert_flows(loss, 'encoder/**', params, x)  # raises
        assert_stopped(loss, 'encoder/**', params, x)
    """


class NothingStoppedWarning(UserWarning):
    """A block had no effect: nothing that was read in it is selected.

    ::

        h = self.encoder(x)
        with nn.stop_gradient('encoder/**'):  # warns: the encoder was read before
            y = self.head(h)
    """


class ScanMemoryWarning(UserWarning):
    """Frozen parameters, or what a function makes of them, are saved for each step.

    Gradients are right. A block around a scan makes float32 weights of int8 ones for
    all layers at once; ``nn.substitute(Layer, function, where='w')`` does so layer by
    layer. A call that uses other modules of the body has to stay in the trace of the
    body::

        nn.Frozen(nn.Sequential([nn.Dense(4), lambda x: self.head(x)]))(x)  # more
        self.head(nn.Frozen(nn.Dense(4))(x))
    """


def __dir__() -> list[str]:
    return sorted(name for name, value in globals().items() if isinstance(value, type))
