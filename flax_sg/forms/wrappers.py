"""``Frozen``: a module around a module, which has no place of its own in the tree.

The naive attempts: a wrapper with a submodule puts its own name into every path, and
``nn.share_scope``, which removes the name again, leaves the submodule with the random
streams and the path that it had before. A wrapper that makes its own class look
like that of the module loses what Flax does to methods of either.

Here the wrapped module is bound to the scope that Flax makes for the wrapper, or the
wrapper takes the scope of a module that has one. Everything that is asked of the
wrapper is asked of the module, in the block of the wrapper, and state is treated as
``state`` says.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
from collections.abc import Callable, Generator, Mapping
from typing import Any

from flax.core.scope import Scope
from flax.linen import nowrap

from flax_sg import errors, filters
from flax_sg.engine import opening
from flax_sg.errors.texts import unknown_choice
from flax_sg.forms import forwarded, given_away, held_state, mistakes
from flax_sg.internals import modules
from flax_sg.internals.modules import Module
from flax_sg.internals.types import Args, Kwargs
from flax_sg.rules import rules
from flax_sg.scans import residuals


class _ScopeOfModule:
    """The scope of a wrapper: that of its module, as soon as there is one.

    ``nn.share_scope`` and methods under ``nn.compact`` replace the scopes of wrappers
    and of modules.
    """

    def __get__(
        self, wrapper: Module | None, owner: type | None = None
    ) -> Scope | None:
        if wrapper is None:
            return None
        attributes = vars(wrapper)
        scope = getattr(attributes.get('module'), 'scope', None)
        return attributes.get('scope') if scope is None else scope

    def __set__(self, wrapper: Module, scope: Scope | None) -> None:
        attributes = vars(wrapper)
        if getattr(attributes.get('module'), 'scope', None) is None:
            attributes['scope'] = scope
        else:
            object.__setattr__(attributes['module'], 'scope', scope)


class _Forwards:
    """The methods of a wrapper.

    A class of its own: Flax wraps the methods of a Module class, and these may run
    before the wrapper is bound, and between the calls of Flax's own methods.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # Flax gives every class a ``scope`` of None.
        setattr(cls, 'scope', _ScopeOfModule())  # noqa: B010

    # The block of a call, and its state.

    _results = held_state.RESULTS

    @contextlib.contextmanager
    def _in_block(self: Any, judge: bool) -> Generator[None]:
        """The block is open, and state is treated as ``state`` says.

        Args:
            judge: whether to raise if a filter matches no variable.
        """
        state = self._state_in(self.where, self.state)
        with state, self._block(self._rewrite, judge):
            yield

    def _state_in(
        self: Any, where: filters.Filter, choice: str
    ) -> contextlib.AbstractContextManager[None]:
        rewrite = held_state.state_in(where, choice, self._results)
        block = self._block(rewrite, judge=False)
        return held_state.handle_state(self.module, choice, block)

    def _block(self: Any, rewrite: rules.Rewrite, judge: bool) -> opening.InBlock:
        owner = self.module if self.within is None else self.within
        judged = opening.EXISTENCE if judge else opening.NOTHING
        return opening.InBlock(rewrite, owner.scope, judged)

    # How a wrapper is made.

    def _check_fields(self: Any) -> None:
        """Makes values of the filter and the collections; raises for wrong fields."""
        where, written = filters.as_filter(self.where), ''
        if isinstance(self.rule, rules.StopGradient):
            name = type(self).__name__.replace('Mirror', 'mirror')
            some = '' if where == filters.Constant(True) else f', {where!r}'
            written = f'nn.{name}({type(innermost(self)).__name__}{some})'
        options = self.collections, self.unused, written
        rewrite = rules.Rewrite(where, self.rule, *options)
        _set(self, where=where, collections=rewrite.collections, _rewrite=rewrite)
        if self.state not in held_state.STATE:
            raise unknown_choice('state', self.state, held_state.STATE)
        mistakes.check_module(type(self).__name__, self.module)

    def _stand_for(self: Any, module: Module) -> None:
        """Takes the scope of a module that has one, and its parent and children."""
        if self._is_named_otherwise(module):
            raise mistakes.named(type(self).__name__, str(self.name), module)
        modules.start(self)
        _set(self, module=module)
        modules.stand_in(self, module)

    def _is_named_otherwise(self: Any, module: Module) -> bool:
        """Whether the user gave a wrapper another name than its module has.

        If ``setup`` assigns a wrapper, Flax names it by the attribute and starts it
        again: that name is not the user's.
        """
        return (
            not modules.is_started(self)
            and None not in (self.name, module.name)
            and self.name != module.name
        )

    def _take_name_of_module(self: Any, place: Any) -> None:
        """Takes the name that Flax would give to the module, such as ``'Dense_0'``.

        Flax would name a wrapper ``'Frozen_0'``, and parameters would have other paths.
        In ``setup`` the attribute gives the name, to a wrapper as to the module.
        """
        if self.name is None and modules.names_at_once(place):
            cls = type(innermost(self.module))
            _set(self, name=modules.autoname(place, cls))

    # What is forwarded to the module.

    def __enter__(self: Any) -> Any:
        raise mistakes.no_block(type(self).__name__, type(innermost(self)))

    def __exit__(self, *exc: object) -> None:
        """Python looks for ``__exit__`` before it calls ``__enter__``, which raises."""

    @functools.partial(forwarded.OfModule, make=forwarded.forwards)
    @nowrap  # ``nn.jit(nn.Frozen)`` and the like would have Flax wrap it.
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Calls the wrapped module."""
        return self._run('__call__', args, kwargs)

    get_variable: Any = forwarded.forwards('get_variable', modules.Module.get_variable)
    put_variable: Any = forwarded.forwards('put_variable', modules.Module.put_variable)
    # With these a program starts a module; ``Module.init`` calls ``init_with_output``.
    apply: Any = forwarded.OfModule(modules.Module.apply, forwarded.refuses)
    init: Any = forwarded.OfModule(modules.Module.init, forwarded.refuses)
    init_with_output: Any = forwarded.OfModule(
        modules.Module.init_with_output, forwarded.refuses
    )
    lazy_init: Any = forwarded.OfModule(modules.Module.lazy_init, forwarded.refuses)

    def _run(
        self: Any,
        name: str,
        args: Args,
        kwargs: Kwargs,
        method: Callable[..., Any] | None = None,
    ) -> Any:
        """Calls a method of the module in the block: by its name, or its function."""

        def bound(module: Module) -> Any:
            return types.MethodType(method, module) if method else getattr(module, name)

        scope = self.scope
        if scope is None:
            return bound(self.module)(*args, **kwargs)
        # At initialization other methods may create a part of the variables.
        judge = name == '__call__' or not scope.get_flag('initializing', False)

        def use(wrapper: Module) -> Any:
            with wrapper._in_block(judge):
                return bound(wrapper.module)(*args, **kwargs)

        name_of = type(self).__name__
        out = residuals.call(name_of, innermost(self), self, use, (args, kwargs))
        # A module in ``out`` reads when it is used.
        return given_away.seen(self, name, out)

    def __getattr__(self: Any, name: str) -> Any:
        """What the wrapped module has under this name, as seen in the block."""
        special = name.startswith('__') and name.endswith('__')
        if special or 'module' not in vars(self) or name in self.__dataclass_fields__:
            raise AttributeError(
                f'{type(self).__name__!r} object has no attribute {name!r}'
            )
        if self.scope is None:
            return given_away.seen(self, name, getattr(self.module, name))
        with self._in_block(judge=False):
            return given_away.seen(self, name, getattr(self.module, name))

    @property
    def variables(self: Any) -> Mapping[str, Mapping[str, Any]]:
        """The variables of the wrapped module, as seen in the block."""
        return self.__getattr__('variables')

    def _read_later(self: Any, name: str, kind: str) -> errors.BlockError:
        wrapper, cls = type(self).__name__, type(innermost(self)).__name__
        return mistakes.read_later(wrapper, cls, name, kind)

    def _part(self: Any, part: Any) -> Any:
        """A wrapper of a part of the module, with the same paths."""
        within = self.module if self.within is None else self.within
        return self.clone(module=part, within=within, name=None)


# Fields that Flax needs, and parts of a wrapper.
_OF_CLONES = 'rule', 'within', 'parent'


class Wrapper(_Forwards, modules.Module):
    """Stands for ``module``, at its place in the tree, and forwards to it.

    Attributes:
        module: the wrapped module.
        where: the variables to rewrite, by paths relative to the wrapped module.
        collections: the collections that ``where`` looks at.
        state: what happens to running statistics and other state.
        unused: what to do if a part of ``where`` matches no variable.
        rule: what a reader sees instead of the stored value.
        within: for a part of a wrapped module, the one that paths are relative to.
    """

    module: Any
    where: Any = True
    collections: Any = 'params'
    state: str = held_state.UPDATE
    unused: str = 'raise'
    rule: rules.Rule = rules.StopGradient()
    within: Any = None

    def __post_init__(self) -> None:
        self._check_fields()
        place = modules.place_of(self)
        module = _as_attached(self.module, place)
        if module.scope is not None:
            self._stand_for(module)
        else:
            _set(self, module=module)
            self._take_name_of_module(place)
            super().__post_init__()

    @nowrap
    def _register_submodules(self, name: str, val: Any) -> None:
        if name not in ('module', 'within'):
            super()._register_submodules(name, val)
        elif name == 'module' and val.scope is None and self.scope is not None:
            module = modules.bind_at(val, self.scope, self.name)
            _set(self, module=module)
            modules.stand_in(self, module)

    @nowrap
    def _try_setup(self, shallow: bool = False) -> None:
        # Flax sets up an argument of a lifted function outside of the transform. If the
        # wrapped module were set up inside, it would draw from other random streams.
        begins = not shallow and modules.starts_setup(self)
        super()._try_setup(shallow)
        if begins:
            with self._in_block(judge=False):
                modules.run_setup(self.module)

    @nowrap
    def _validate_setup(self) -> None:
        """Checks nothing: the module is bound already."""

    @nowrap
    def _call_wrapped_method(self, fun: Any, args: Args, kwargs: Kwargs) -> Any:
        # ``apply(variables, x, method=nn.Embed.attend)`` calls it with the wrapper.
        of_module = modules.is_method_of(fun, type(innermost(self)))
        if of_module and not modules.is_method_of(fun, type(self)):
            return self._run(fun.__name__, args, kwargs)
        return super()._call_wrapped_method(fun, args, kwargs)


class Frozen(Wrapper):
    """A module whose parameters get no gradient through it.

    ``where`` names what is **frozen**, by default everything.

    What is read through the wrapper (calls, methods, attributes, submodules) is read
    through ``jax.lax.stop_gradient``. Parameter names, initial values, random streams
    and outputs are those of the bare module, wherever it stands: checkpoints fit both
    ways. Gradients flow *through* it to its input. Another use of the same module is
    not touched: ``l`` and ``Frozen(l)`` may stand in one model.

    >>> import jax, jax.numpy as jnp
    >>> from flax_sg import linen as nn
    >>> model = nn.Sequential([nn.Frozen(nn.Dense(3)), nn.relu, nn.Dense(1)])
    >>> x = jnp.ones((4, 2))
    >>> params = model.init(jax.random.key(0), x)['params']
    >>> grads = jax.grad(lambda p: jnp.sum(model.apply({'params': p}, x)))(params)
    >>> {name: bool(jnp.any(g['kernel'] != 0)) for name, g in grads.items()}
    {'layers_0': False, 'layers_2': True}

    Around a finished model, some of its parameters; and what it forwards:

    >>> tuned = nn.Frozen(model, 'layers_2/bias')
    >>> embed = nn.Frozen(nn.Embed(num_embeddings=5, features=2))
    >>> variables = embed.init(jax.random.key(0), jnp.array([1, 2]))
    >>> embed.apply(variables, x, method='attend').shape
    (4, 5)
    >>> embed.bind(variables).embedding.shape
    (5, 2)

    ``isinstance(Frozen(dense), nn.Dense)`` is False: it is a wrapper, and the module
    is its attribute ``module``, which is not under the rule. A field of the wrapper
    hides an attribute of the same name, and special methods other than ``__call__``
    are not forwarded. ``__call__`` has the signature of the module's. ``nn.vjp``,
    ``nn.jvp`` and ``nn.custom_vjp`` take no module with a module in it: wrap inside of
    them. A ``Variable``, or a closure that holds modules, would be read later: the
    wrapper raises where its module returns one. Of a method that returns a module in
    the body of a scan, JAX raises ``UnexpectedTracerError``: read an attribute instead.
    ``nn.intercept_methods`` sees the module, not the wrapper.

    Args:
        module: a Module instance, bound or not.
        where: the parameters to freeze, by paths relative to ``module``: any kind of
            filter, see ``nn.stop_gradient``. All of them by default, those of modules
            that it merely uses (``nn.RNN(self.cell)``) included.
        collections: the collections that ``where`` looks at, ``'params'`` by default.
        state: what happens to batch statistics and other state that ``where``
            selects: all of it by default, with ``'stage_1/**'`` all in that stage, with
            ``'**/kernel'`` none. State is every mutable collection but ``'params'``.
            ``'intermediates'``, ``'perturbations'`` and what the module sows
            (``self.sow``) are results, and ``'cache'`` is what a model that generates
            works with: these are written as ever:

            * ``'update'``: it is updated, as without the wrapper;
            * ``'hold'``: each call works on a copy that is dropped when it ends. What
              it computes is the same, with normalization by the batch. ``mutable=``
              has to name the state, as without the wrapper;
            * ``'eval'``: held, layers that can (an argument or field
              ``use_running_average``, or ``update_stats``) use what is stored, and
              dropout is off (an argument or field ``deterministic``), whatever they are
              told. Dropout is off in a module if ``where`` selects everything under its
              path: with True or ``'stage_1/**'``, not with ``'**/kernel'``. What is
              created, at init, is created as ever.
        unused: ``'raise'`` if a part of ``where`` matched no variable by the end of a
            call, ``'ignore'`` to let that pass.

    Raises:
        ArgumentTypeError: if ``module`` is no module: None, a function, a class. When
            ``apply`` or ``init`` is called that the module overrides.
        ArgumentValueError: if it is given another name than the module has already.
        UnusedFilterError: at the end of a call, if a part of ``where`` matched nothing.

    Note:
        In the body of ``nn.scan`` the stacked weights are no residual of every step, as
        they are where ``stop_gradient`` is written into the body by hand; a call with a
        function that uses other modules of the body warns (``ScanMemoryWarning``).
        Flux.jl #1931 asks for the same in Julia.
    """


# ``help(Frozen)`` shows what a user may write.
_fields = inspect.signature(Frozen.__init__).parameters.values()
_shown = [x.replace(annotation=x.empty) for x in _fields if x.name not in _OF_CLONES]
setattr(Frozen.__init__, '__signature__', inspect.Signature(_shown))  # noqa: B010


def _set(module: Module, /, **attributes: Any) -> None:
    """Sets attributes of a module, whose class is frozen."""
    for name, value in attributes.items():
        object.__setattr__(module, name, value)


def innermost(module: Module) -> Module:
    """The module in all its wrappers."""
    while isinstance(module, Wrapper):
        module = module.module
    return module


def _as_attached(module: Module, place: Any) -> Module:
    """A module; or its clone, if Flax has attached one in the tree of a place.

    Flax clones a module that was made outside of all modules, once in each tree: each
    of its uses in the tree is the same clone, and so is that of a wrapper.

    Args:
        module: the module of a wrapper.
        place: the parent of the wrapper: a module, a scope or None.
    """
    scope = place if isinstance(place, Scope) else getattr(place, 'scope', None)
    is_made_outside = module.scope is None and module.parent is None
    if scope is None or not is_made_outside:
        return module
    clone = modules.attached(module, scope)
    if clone is not None or not isinstance(module, Wrapper):
        return module if clone is None else clone
    inner = _as_attached(module.module, scope)
    return module if inner is module.module else module.clone(module=inner)
