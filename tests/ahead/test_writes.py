"""What a function writes to a model of NNX, beside the function itself."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax import lax

import flax_sg as sg
from flax_sg.ahead.writes import handed_through
from tests.ahead.splits import assert_same, bits

X = jax.random.normal(jax.random.key(5), (6, 4))


class Seen(nnx.Variable[Any]):
    """Two sums and a count in one Variable."""


class Net(nnx.Module):
    """A frozen body with statistics; behind it dropout and a head."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.body = nnx.Linear(4, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.head = nnx.Linear(4, 2, rngs=rngs)
        self.seen = Seen({'head': jnp.zeros(2), 'count': 0})

    def __call__(self, x: Any) -> Any:
        out = self.head(self.drop(jnp.tanh(self.norm(self.body(x)))))
        head, count = self.seen['head'], self.seen['count']
        new = Seen({'head': head + out.sum(0), 'count': count + 1})
        self.seen.update_from_state(new)
        return out


def fun(model: Any, x: Any) -> Any:
    return jnp.mean(model(x) ** 2)


@pytest.mark.parametrize('jit', (lambda f: f, nnx.jit), ids=('eager', 'jit'))
def test_steps_go_on_as_those_of_the_function(jit: Any):
    """Each draws another mask, and averages move, also those of the frozen part."""
    model, other = Net(nnx.Rngs(0)), Net(nnx.Rngs(0))
    ahead = sg.precompute(fun, model, X, wrt='head/**')
    assert [k.shape for k in ahead.kept] == [(4,), (4,), (6, 4)]
    kept = jit(ahead.early)(model, X)
    wrt = nnx.DiffState(0, nnx.PathContains('head'))
    ours = jit(nnx.value_and_grad(ahead.late, argnums=wrt))
    right = jit(nnx.value_and_grad(fun, argnums=wrt))
    values: set[float] = set()
    for _ in range(3):
        mine, theirs = ours(model, kept), right(other, X)
        values.add(float(mine[0]))
        mine, theirs = (mine, nnx.state(model)), (theirs, nnx.state(other))
        assert jax.tree.structure(mine) == jax.tree.structure(theirs)
        assert_same(*(bits(jax.tree.leaves(x)) for x in (mine, theirs)))
    assert len(values) == 3


def in_a_loop(body: Any, x: Any) -> Any:
    """The body stands among what is carried, and writes nothing."""
    return nnx.fori_loop(0, 2, lambda _, c: (c[0], c[0](c[1])), (body, x))[1]


@pytest.mark.parametrize(
    'call',
    (nnx.remat(nnx.Linear.__call__), nnx.jit(nnx.Linear.__call__), in_a_loop),
    ids=('remat', 'jit', 'loop'),
)
def test_what_a_transformation_writes_as_it_was(call: Any):
    """A frozen part under it is computed once, also that of a teacher."""

    def fun(model: Any, teacher: Any, x: Any) -> Any:
        h = call(model.body, x) - call(teacher.body, x)
        return jnp.mean(model.head(model.drop(jnp.tanh(h))) ** 2)

    model, other, teacher = (Net(nnx.Rngs(n)) for n in (0, 0, 1))
    ahead = sg.precompute(fun, model, teacher, X, wrt='head/**')
    assert [k.shape for k in ahead.kept] == [(6, 4)]
    kept = ahead.early(model, teacher, X)
    for _ in range(3):
        assert_same(ahead.late(model, kept), fun(other, teacher, X))


NEW = None
# Which of two outputs are inputs, and a function of two arrays that returns them.
HANDED: dict[str, tuple[list[int | None], Any]] = {
    'as they are': ([1, 0], lambda a, b: (b, a)),
    'something else': ([NEW, NEW], lambda a, b: (a + b, 1.0)),
    'through jit': ([1, NEW], jax.jit(lambda a, b: (b, a * 2))),
    'through two': (
        *([1, 0], jax.checkpoint(lambda a, b: jax.jit(lambda b: (b, a))(b))),
    ),
    'by one branch or another': (
        *([0, NEW], lambda a, b: lax.cond(a[0] > 0, lambda: (a, a), lambda: (a, b))),
    ),
    'carried': ([0, NEW], lambda *c: lax.fori_loop(0, 3, one_more, c)),
    'by turns': ([NEW, NEW], lambda *c: lax.scan(exchanged, c, length=1)[0]),
    'scanned': ([0, NEW], lambda a, b: lax.scan(beside, b[0], a)[1]),
    'after a while': (
        [0, NEW],
        lambda a, b: lax.while_loop(lambda c: c[1][0] < 3, lambda c: (c[0], a), (a, b)),
    ),
}


def one_more(_: Any, carry: Any) -> Any:
    return carry[0], carry[1] + 1


def exchanged(carry: Any, _: None) -> Any:
    return carry[::-1], None


def beside(carry: Any, x: Any) -> Any:
    return carry, (x, x + carry)


@pytest.mark.parametrize('name', HANDED)
def test_which_outputs_are_inputs(name: str):
    expected, fun = HANDED[name]
    x = jnp.arange(3.0)
    assert handed_through(jax.make_jaxpr(fun)(x, x)) == expected


def test_another_variable_in_the_place_of_one():
    """It is written as well: the mean goes on from step to step."""

    class Mean(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.body = nnx.Linear(4, 4, rngs=rngs)
            self.head = nnx.Linear(4, 2, rngs=rngs)
            self.mean = nnx.BatchStat(jnp.zeros((1, 4)))

        def __call__(self, x: Any) -> Any:
            x = self.body(x)
            mean = 0.5 * self.mean[...] + x.mean(0, keepdims=True)
            self.mean = nnx.BatchStat(mean)
            return self.head(jnp.tanh(x - mean))

    model, other = Mean(nnx.Rngs(0)), Mean(nnx.Rngs(0))
    ahead = sg.precompute(fun, model, X, wrt='head/**')
    kept = ahead.early(model, X)
    for _ in range(3):
        assert_same(ahead.late(model, kept), fun(other, X))
        assert_same(model.mean[...], other.mean[...])


def test_a_teacher_among_the_data():
    """What is written to it cannot go on from step to step: said once."""
    model, teacher = Net(nnx.Rngs(0)), Net(nnx.Rngs(1))

    def distill(model: Any, teacher: Any, x: Any) -> Any:
        return jnp.mean((model(x) - teacher(x)) ** 2)

    with pytest.warns(UserWarning, match=r'distill .*writes to argument 1 \(teacher\)'):
        sg.precompute(distill, model, teacher, X, wrt='head/**')
    ahead = sg.precompute(distill, model, teacher, X, wrt='0/head/**', argnums=(0, 1))
    other, other_teacher = Net(nnx.Rngs(0)), Net(nnx.Rngs(1))
    kept = ahead.early(model, teacher, X)
    for _ in range(2):
        ours = ahead.late(model, teacher, kept)
        assert_same(ours, distill(other, other_teacher, X))
    assert teacher.drop.rngs is not None
    assert teacher.seen['count'] == 2
