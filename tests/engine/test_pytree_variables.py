"""Variables that hold pytrees: one filter selects the same leaves everywhere."""

import re
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.core import FrozenDict
from flax.core.meta import Partitioned

import flax_sg as sg
from flax_sg import errors
from flax_sg import linen as nn
from tests.helpers import oracle
from tests.helpers.described.modules import Do
from tests.helpers.left_over import forget_contexts
from tests.helpers.profile import LONG


class Quantized(flax.struct.PyTreeNode):
    """As a QArray is: numbers that are not differentiated, and their scale."""

    q: Any
    scale: Any


class Pair(NamedTuple):
    left: Any
    right: Any


def ones(number):
    return jnp.full(2, float(number))


def box(x):
    return Partitioned(x, (None,))


VALUES: dict[str, Any] = {
    'tuple': (ones(2), ones(3)),
    'named tuple': Pair(ones(2), Pair(ones(3), ones(4))),
    'dataclass': Quantized(jnp.arange(2, dtype=jnp.int8), ones(3)),
    'dict': {'u': ones(2), 'v': {'x': ones(3)}},
    'frozen dict': FrozenDict(u=ones(2), v=ones(3)),
    'box': box(ones(2)),
    'box of a tuple': box((ones(2), ones(3))),
    'boxes in a tuple': (box(ones(2)), ones(3)),
    'dict in a tuple': (ones(2), {'z': ones(3), 'a': ones(4)}),
}


def total(module):
    w = module.param('w', lambda _: VALUES[module.kind])
    b = module.param('b', lambda _: ones(9))
    leaves = jax.tree.leaves((w, b))
    return sum(jnp.sum(leaf.astype(float) ** 2) for leaf in leaves)


class Model(nn.Module):
    kind: str

    @nn.compact
    def __call__(self):
        return total(self)


class InFrozen(nn.Module):
    kind: str
    where: Any

    @nn.compact
    def __call__(self):
        return nn.Frozen(Model(self.kind), where=self.where, unused='ignore')()


def differentiable(tree):
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {
        jax.tree_util.keystr(keys): leaf
        for keys, leaf in leaves
        if getattr(leaf, 'dtype', None) == jnp.float32
    }


def zeros(tree):
    found = differentiable(tree)
    return {name for name, leaf in found.items() if not np.any(leaf)}


def there(tree):
    return set(differentiable(tree))


def grads_of(loss, params):
    return jax.grad(loss, allow_int=True)(params)


def blocked(kind, where):
    def loss(params):
        with nn.stop_gradient(where, unused='ignore'):
            return Model(kind).apply({'params': params})

    return loss


def in_block(params, kind, where):
    return zeros(grads_of(blocked(kind, where), params))


def in_frozen(params, kind, where):
    tree = InFrozen(kind, where)
    variables = oracle.init(tree, jax.random.key(0))['params']
    [name] = variables
    grads = grads_of(lambda p: tree.apply({'params': {name: p}}), params)
    return zeros(grads)


def loss_of(kind):
    return lambda params: Model(kind).apply({'params': params})


def on_tree(params, kind, where):
    def loss(params):
        return loss_of(kind)(sg.stop_gradient(params, where, unused='ignore'))

    return zeros(grads_of(loss, params))


def in_grad(params, kind, where):
    grads = sg.grad(loss_of(kind), wrt=where, unused='ignore')(params)
    return there(grads)


def in_freeze(params, kind, where):
    tx = sg.freeze(optax.sgd(1.0), where, unused='ignore')
    grads = sg.grad(loss_of(kind))(params)
    state = tx.init(params)
    return zeros(tx.update(grads, state, params)[0])


def in_partition(params, kind, where):
    del kind
    return there(sg.partition(params, where, unused='ignore')[0])


def in_mask(params, kind, where):
    del kind
    mask = sg.mask(params, frozen=where, unused='ignore')
    both = jax.tree.map(lambda leaf, take: leaf if take else None, params, mask)
    return there(both)


def in_flow(params, kind, where):
    """What a loss does not train: its gradient is stopped on the way."""
    live = sg.live(blocked(kind, where), params)
    return there(sg.partition(params, ~live)[0])


SURFACES = [
    *(in_block, in_frozen, on_tree, in_grad),
    *(in_freeze, in_partition, in_mask, in_flow),
]

B = "['b']"
CASES: list[tuple[str, Any, set[str]]] = [
    ('tuple', 'w', {"['w'][0]", "['w'][1]"}),
    ('tuple', '*', {"['w'][0]", "['w'][1]", B}),
    ('tuple', 'w/0', {"['w'][0]"}),
    ('tuple', 'w/**', {"['w'][0]", "['w'][1]"}),
    ('tuple', re.compile('w'), {"['w'][0]", "['w'][1]"}),
    ('tuple', lambda path: path == 'w/1', {"['w'][1]"}),
    ('tuple', lambda path: path.name == 'w', {"['w'][0]", "['w'][1]"}),
    ('tuple', {'w': (True, False), 'b': False}, {"['w'][0]"}),
    ('tuple', ~sg.filters.as_filter('w'), {B}),
    ('tuple', ~sg.filters.as_filter('w/0'), {"['w'][1]", B}),
    ('named tuple', 'w/right', set()),
    ('named tuple', 'w/right/*', {"['w'].right.left", "['w'].right.right"}),
    ('named tuple', 'w', {f"['w'].{n}" for n in ('left', 'right.left', 'right.right')}),
    ('dataclass', 'w', {"['w'].scale"}),
    ('dataclass', '*', {"['w'].scale", B}),
    # What is nested in dicts may as well be a module: an entry is a variable.
    ('dict', 'w', set()),
    ('dict', 'w/u', {"['w']['u']"}),
    ('dict', 'w/**', {"['w']['u']", "['w']['v']['x']"}),
    ('frozen dict', 'w/*', {"['w']['u']", "['w']['v']"}),
    ('box', 'w', {"['w'].value"}),
    ('box', 'w/value', set()),
    ('box of a tuple', 'w', {"['w'].value[0]", "['w'].value[1]"}),
    ('boxes in a tuple', 'w', {"['w'][0].value", "['w'][1]"}),
    ('dict in a tuple', 'w/1/a', {"['w'][1]['a']"}),
    ('dict in a tuple', 'w', {"['w'][0]", "['w'][1]['a']", "['w'][1]['z']"}),
]


# Which leaves there are is asked on trees; the others, which trace, take some cases.
@pytest.mark.parametrize('surface', SURFACES)
def test_one_rule(surface):
    quick = surface in (in_partition, in_mask, in_block)
    for kind, where, expected in CASES if quick or LONG else CASES[::4]:
        params = oracle.init(Model(kind), jax.random.key(0))['params']
        assert surface(params, kind, where) == expected, (kind, where)


PARAMS = {'w': VALUES['tuple'], 'b': ones(9)}  # Of the model of a tuple.


def test_a_dict_within_a_variable_keeps_its_order():
    names = Do(lambda module: [*module.get_variable('params', 'w')[1]])
    with nn.stop_gradient('w'):
        assert names.apply({'params': {'w': VALUES['dict in a tuple']}}) == ['z', 'a']


def test_what_names_nothing_raises_everywhere():
    for where in ('w/2', 'w/*/*'):
        with pytest.raises(errors.UnusedFilterError):
            sg.partition(PARAMS, where)
        with pytest.raises(errors.UnusedFilterError), nn.stop_gradient(where):
            Model('tuple').apply({'params': PARAMS})


def test_a_trace_is_found_by_the_leaves_that_a_filter_takes():
    traces = []

    @jax.jit
    def fn(params):
        traces.append(1)
        return Model('tuple').apply({'params': params})

    def stopped(*names):
        def loss(params):
            with nn.stop_gradient(lambda path: path in names):
                return fn(params)

        return zeros(jax.grad(loss)(PARAMS))

    whole = {"['w'][0]", "['w'][1]"}
    for _ in range(2):
        assert stopped('w') == whole
        assert stopped('w/0', 'w/1') == whole  # The same answers.
        assert stopped('w/0') == {"['w'][0]"}
    assert len(traces) == 2


def test_other_values():
    with nn.substitute({'w': (ones(0), ones(5))}, where='w/0'):
        assert loss_of('tuple')(PARAMS) == 2 * (0 + 9 + 81)
    with nn.substitute({'w': (ones(0), ones(5))}):
        assert loss_of('tuple')(PARAMS) == 2 * (0 + 25 + 81)


@flax.struct.dataclass
class Field:
    """What another model calls a module."""

    u: jax.Array


def in_module(module):
    """'w/u' is the parameter 'u' of the module 'w'."""
    return Do(lambda w: w.param('u', nn.initializers.ones, (2,)), name='w')()


def in_variable(module):
    """'w/u' is a leaf of the parameter 'w'."""
    return module.param('w', lambda _: Field(jnp.ones(2))).u


@pytest.mark.parametrize(
    ('how', 'order'),
    [('eager', (0, 1)), ('jitted', (1, 0)), ('bound, in a raw closure', (0, 1))],
)
def test_a_path_that_is_a_leaf_here_and_a_parameter_there(how, order):
    forget_contexts()
    models = Do(in_module), Do(in_variable)
    variables = [model.init(jax.random.key(0)) for model in models]
    applies = [model.apply for model in models]
    if how == 'jitted':
        applies = [jax.jit(apply) for apply in applies]

    def read(number, variables):
        if how != 'bound, in a raw closure':
            return applies[number](variables)
        bound = models[number].bind(variables)
        return jax.jit(lambda one: one * bound())(1.0)

    def loss(variables):
        with nn.stop_gradient('w'):
            return sum(jnp.sum(read(n, variables[n])) for n in order)

    of_module, of_variable = jax.grad(loss)(variables)
    assert of_module['params']['w']['u'].tolist() == [1.0, 1.0]
    assert of_variable['params']['w'].u.tolist() == [0.0, 0.0]
