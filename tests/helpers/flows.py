"""Small programs, and what each does to its parameters, written by hand.

A program is a function of ``a`` and ``b``, arrays of three numbers, that returns one
array. Beside it stands for each of the two ``'flows'``, ``'stopped'`` or ``'unused'``.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import custom_batching, lax
from jax.sharding import AxisType, Mesh, PartitionSpec

import flax_sg as sg
from flax_sg import linen as nn

Fn = Callable[[Any, Any], Any]
stop = lax.stop_gradient


@jax.custom_jvp
def jvp_of_one(a, b):
    return a * b


jvp_of_one.defjvps(lambda t, out, a, b: t * b, None)


@jax.custom_jvp
def jvp_constant(a, b):
    return a * b


jvp_constant.defjvp(lambda primals, tangents: (primals[0], jnp.ones(3)))


@jax.custom_vjp
def vjp_against_the_code(a, b):
    return stop(a) * b


vjp_against_the_code.defvjp(
    lambda a, b: (a * b, (a, b)), lambda kept, g: (kept[1] * g, None)
)


@jax.custom_vjp
def vjp_in_zeros(a, b):
    return a + b


vjp_in_zeros.defvjp(
    lambda a, b: (a + b, a), lambda a, g: (jax.jit(jnp.zeros_like)(a), 2.0 * g)
)


@jax.custom_vjp
def vjp_constant(a, b):
    return b


vjp_constant.defvjp(lambda a, b: (b, None), lambda _, g: (jnp.ones(3), g))


@custom_batching.custom_vmap
def with_batches(a, b):
    return stop(a) * b


with_batches.def_vmap(lambda size, batched, a, b: (with_batches(a, b), batched[0]))


def bits(a, b):
    raw = lax.bitcast_convert_type(a, jnp.int32)
    return lax.bitcast_convert_type(raw, jnp.float32) + stop(b)


def jitted(a, b):
    inner = jax.jit(lambda a, b: (stop(a), b * 2.0))
    left, right = jax.jit(lambda a, b: inner(a, b))(a, b)
    return left + right


def carried(a, b):
    def turn(carry, x):
        kept, other = carry
        return (other, kept * stop(b)), x

    return lax.scan(turn, (a, jnp.ones(3)), None, length=3)[0][1]


def scanned(a, b):
    def turn(carry, x):
        return carry + x[1], stop(x[0]) * carry

    last, each = lax.scan(turn, jnp.zeros(()), (a, b))
    return last + each


def scanned_constants(a, b):
    last, _ = lax.scan(lambda c, _: (c * a, jnp.sign(b)), jnp.ones(3), length=2)
    return last + lax.scan(lambda c, _: (c, stop(b) * c), 1.0, length=3)[1][0]


def reached_after_two_turns(a, b):
    def turn(carry, _):
        first, second, third = carry
        return (a, first, second), third * stop(b)

    return lax.scan(turn, (jnp.ones(3),) * 3, None, length=4)[1][3]


def carried_in_vain(a, b):
    def turn(carry, _):
        return (2.0 * carry[0], 3.0 * carry[1], b), None

    return lax.scan(turn, (a, b, b), length=2)[0][0]


def masked_in_a_loop(a, b):
    def turn(carry, _):
        return carry * MASK + b * 0.0, carry

    return lax.scan(turn, a, None, length=3)[1]


def moved_by_one_place_in_each_turn(a, b):
    def turn(carry, _):
        return (carry[-1], *carry[:-1]), None

    first = (a, *[jnp.zeros(3)] * 40)
    return lax.scan(turn, first, None, length=50)[0][0] + b


def two_loops_that_carry_a_parameter_on(a, b):
    def loop():
        start = jnp.ones(3), jnp.ones(3)
        return lax.scan(lambda c, _: ((c[0] * 2.0, a), None), start, length=2)[0][1]

    return stop(loop()) * loop()


def while_loop(a, b):
    def more(carry):
        return jnp.sum(carry[1]) < jnp.sum(jnp.abs(b)) + 2.0

    start = a, jnp.zeros(3)
    return lax.while_loop(more, lambda c: (c[0] * 0.5, c[1] + 1.0), start)[0]


def turns_of_a_loop(a, b):
    count = lax.while_loop(lambda n: n < stop(b[0]), lambda n: n + 1.0, 0.0)
    return a * stop(count)


def one_of_the_branches(a, b):
    branches = [lambda a, b: jnp.sign(b), lambda a, b: a, lambda a, b: jnp.ones(3)]
    return lax.switch((b < 9.0).astype(jnp.int32)[0], branches, a, b)


def out_of_nothing_in_a_loop(a, b):
    def turn(carry, _):
        return jax.jit(vjp_constant)(2.0 * a, carry), None

    return lax.scan(turn, b, None, length=2)[0]


def sharded(a, b):
    spec = PartitionSpec('i')
    each = jax.shard_map(
        lambda a, b: jnp.sign(a) * lax.psum(b, 'i'),
        mesh=Mesh(jax.devices()[:1], ('i',)),
        in_specs=spec,
        out_specs=spec,
    )
    return each(a, b)


def called_back_on_what_is_stopped(a, b):
    shape = jax.ShapeDtypeStruct((), jnp.float32)
    jax.debug.print('{}', b)
    return a * jax.pure_callback(lambda: jnp.float32(2.0), shape)


def of_a_tree(back: Callable[[Any, Any], Any]) -> Fn:
    """Reads ``a`` alone behind a rule of both, with a backward pass of its own."""

    @jax.custom_vjp
    def rule(tree):
        return jax.tree.map(lambda x: x * 1.0, tree)

    def backward(tree, cotangents):
        return (jax.tree.map(back, cotangents, tree),)

    rule.defvjp(lambda tree: (rule(tree), tree), backward)
    return lambda a, b: rule({'a': a, 'b': b})['a']


TABLE = np.array([1.0, 0.5, 2.0], np.float32)
MASK = np.array([1.0, 0.0, 1.0], np.float32)


@jax.custom_vjp
def vjp_with_a_table(a, b):
    return a * b * TABLE


vjp_with_a_table.defvjp(
    lambda a, b: (vjp_with_a_table(a, b), b), lambda b, g: (g * b * TABLE, None)
)


def quantized(a, b):
    """A frozen quantized kernel, as in QLoRA, beside what is trained."""

    @jax.custom_vjp
    def product(x, kernel):
        return x * jnp.round(kernel * 16.0) / 16.0

    product.defvjp(
        lambda x, kernel: (product(x, kernel), kernel),
        lambda kernel, g: (g * jnp.round(kernel * 16.0) / 16.0, kernel * 0.0),
    )
    return product(a, b)


def in_a_mesh(fn: Fn, explicit: bool = False) -> Fn:
    """A function behind ``shard_map``, or on an explicit axis."""
    kind = AxisType.Explicit if explicit else AxisType.Auto
    mesh, spec = Mesh(jax.devices()[:1], ('i',), (kind,)), PartitionSpec('i')
    if not explicit:
        return jax.shard_map(fn, mesh=mesh, in_specs=spec, out_specs=spec)

    def run(a, b):
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            out = fn(jax.sharding.reshard(a, spec), jax.sharding.reshard(b, spec))
            return jax.sharding.reshard(out, PartitionSpec())

    return jax.jit(run)


def stopped_one_level(a, b):
    return sg.rewrite({'a': a, 'b': b}, nn.stop_gradient('a', levels=1))['a'] * b


def behind(rewrite: Any) -> Fn:
    """Reads ``a`` alone behind a rule for gradients of both."""
    return lambda a, b: sg.rewrite({'a': a, 'b': b}, rewrite)['a'] * 2.0


def written_and_read(a, b):
    ref = jax.new_ref(stop(a))
    ref[...] = ref[...] * 2.0
    return ref[...] + jnp.zeros(3)


def solved(a, b):
    return jax.scipy.sparse.linalg.cg(lambda x: 2.0 * x, a, x0=b)[0]


F, S, U = 'flows', 'stopped', 'unused'
PROGRAMS: dict[str, tuple[Fn, str, str]] = {
    # Primitives.
    'product': (lambda a, b: a * b, F, F),
    'stopped': (lambda a, b: stop(a) * b, S, F),
    'itself_taken_from_itself': (lambda a, b: a - a, F, U),
    'signs_and_rounding': (
        lambda a, b: jnp.sign(a) + jnp.floor(b) * jnp.round(a),
        S,
        S,
    ),
    'integers': (lambda a, b: a.astype(jnp.int32).astype(jnp.float32) * b, S, F),
    'bits': (bits, S, S),
    'predicate': (lambda a, b: jnp.where(a > 0, b, 1.0), S, F),
    'sorted_by_another': (lambda a, b: lax.sort((b, a), num_keys=1)[1], F, S),
    'linear_solve': (lambda a, b: jnp.linalg.solve(jnp.diag(stop(b)), a), F, S),
    'called_back_on_what_is_stopped': (called_back_on_what_is_stopped, F, U),
    'a_key': (lambda a, b: a * jax.random.uniform(jax.random.key(0), (3,)), F, U),
    'split': (lambda a, b: sum(jnp.split(a * jnp.zeros(3), 3)), S, U),
    'padding': (lambda a, b: lax.pad(a, 0.0, [(-1, 2, 0)]), F, U),
    'padding_within': (lambda a, b: lax.pad(a, 0.0, [(0, 1, 1)]), F, U),
    'a_mask_and_not': (lambda a, b: jnp.where(~(b > 1.0), a, 0.0), F, S),
    'a_constant_mask_and_not': (lambda a, b: jnp.where(~(MASK > 0), a, 0.0), F, U),
    # The body of ``jnp.where`` is one for both calls: neither stops a part.
    'two_calls_of_one_function': (
        lambda a, b: jnp.where(MASK > 0, stop(a), 0.0) + jnp.where(MASK > 0, a, b),
        F,
        F,
    ),
    'complex': (lambda a, b: jnp.real(lax.complex(a, b) * 1j), F, F),
    # Transforms.
    'dead_code': (lambda a, b: (a, a * b)[0], F, U),
    'jitted': (jitted, S, F),
    'rematerialized': (
        lambda a, b: jax.checkpoint(lambda a, b: jnp.sin(jnp.sign(a) * b))(a, b),
        S,
        F,
    ),
    'derivative_inside': (lambda a, b: jax.grad(lambda a: jnp.sum(a**2 * b))(a), F, F),
    'derivative_that_loses_one': (
        lambda a, b: jax.grad(lambda a: jnp.sum(a * b))(a),
        U,
        F,
    ),
    'sharded': (sharded, S, F),
    # Loops and branches.
    'carried': (carried, F, S),
    'scanned': (scanned, S, F),
    'scanned_constants': (scanned_constants, F, S),
    'reached_after_two_turns': (reached_after_two_turns, F, S),
    'decides_a_branch': (lambda a, b: lax.cond(b[0] > 0.0, jnp.sin, jnp.cos, a), F, S),
    'decides_the_turns': (turns_of_a_loop, F, S),
    'carried_in_vain': (carried_in_vain, F, U),
    'masked_in_a_loop': (masked_in_a_loop, F, S),
    'moved_by_one_place_in_each_turn': (moved_by_one_place_in_each_turn, F, F),
    'two_loops_that_carry_a_parameter_on': (two_loops_that_carry_a_parameter_on, F, U),
    'one_of_the_branches': (one_of_the_branches, F, S),
    # Rules of users.
    'custom_jvp': (jvp_of_one, F, S),
    # Forward mode gets a tangent, and backward mode nothing.
    'custom_jvp_out_of_nothing': (jvp_constant, S, S),
    'custom_vjp': (vjp_against_the_code, F, S),
    'batched_custom_vjp': (jax.vmap(jax.jit(vjp_against_the_code)), F, S),
    'decay_in_a_rule': (of_a_tree(lambda g, w: g + 0.01 * w), F, F),
    'cosine_in_a_rule': (of_a_tree(lambda g, w: jnp.cos(g)), F, F),
    'zeros_replaced_in_a_rule': (
        of_a_tree(lambda g, w: jnp.where(g == 0.0, 1.0, g)),
        F,
        F,
    ),
    'each_for_itself_in_a_rule': (of_a_tree(lambda g, w: g * w), F, S),
    'a_rule_with_a_table': (vjp_with_a_table, F, S),
    'a_rule_with_a_table_in_a_mesh': (in_a_mesh(vjp_with_a_table), F, S),
    'a_rule_on_an_explicit_axis': (in_a_mesh(vjp_with_a_table, True), F, S),
    'quantized': (quantized, F, S),
    'quantized_in_a_mesh': (in_a_mesh(quantized), F, S),
    'quantized_on_an_explicit_axis': (in_a_mesh(quantized, True), F, S),
    'a_rule_that_is_not_read': (lambda a, b: (vjp_constant(a, b), b)[1], U, F),
    'device_put': (lambda a, b: jax.device_put({'a': a, 'b': b})['a'], F, U),
    'barrier': (lambda a, b: lax.optimization_barrier((a, b))[0], F, U),
    'power_of_zero': (lambda a, b: b**0, U, S),
    'power_of_zero_beside': (lambda a, b: a**2 + b**0, F, S),
    'start_of_an_iteration': (solved, F, S),
    'one_level': (stopped_one_level, S, F),
    'clipped_by_the_global_norm': (
        behind(nn.clip_gradient(True, global_norm=1.0)),
        F,
        S,
    ),
    'copied_and_added': (behind(nn.copy_cotangent({'b': 'a'}, add=True)), F, F),
    'replaced': (behind(nn.replace_cotangent(True, 3.0)), F, U),
    'custom_vjp_with_zeros': (vjp_in_zeros, S, F),
    'custom_vjp_out_of_nothing': (lambda a, b: vjp_constant(a * 2.0, b), F, F),
    'out_of_nothing_in_a_loop': (out_of_nothing_in_a_loop, F, F),
    'unreached_custom_vjp': (lambda a, b: jnp.sign(vjp_constant(a, b)), S, S),
}

# A report knows no numbers: by them, the gradient of ``a`` is zero.
ZERO_BY_CHANCE = (
    *('itself_taken_from_itself', 'complex', 'moved_by_one_place_in_each_turn'),
)

if hasattr(jax, 'new_ref'):  # From JAX 0.8 on.
    PROGRAMS['written_and_read'] = (written_and_read, S, U)
    PROGRAMS['mutable_array'] = (lambda a, b: a * jax.new_ref(stop(b))[...], F, S)


# What ``jax.grad`` refuses.


def closed_over(a, b):
    @jax.custom_vjp
    def fn(x):
        return x * a

    fn.defvjp(lambda x: (x * a, None), lambda _, g: (g,))
    return fn(b)


def windows(a, b):
    def added(x, y):
        return x[0] + y[0], x[1] + y[1]

    return lax.reduce_window((a, b), (0.0, 0.0), added, (1,), (1,), 'VALID')[0]


REFUSED: dict[str, Fn] = {
    'while_loop': while_loop,
    'custom_vmap': with_batches,
    'betainc': lambda a, b: jax.scipy.special.betainc(a, b, 0.5),
    'composite': lambda a, b: lax.composite(jnp.sin, 'my.sine')(a),
    'reduce_window': windows,
    'closed_over': jax.jit(closed_over),
}
