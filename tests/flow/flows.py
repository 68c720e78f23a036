"""Small programs, and which of their outputs each parameter reaches, written by hand.

Each program is a function of ``a`` and ``b``, arrays of three numbers, that returns one
array; ``FLOWS`` says for each of the two ``'flows'``, ``'stopped'`` or ``'unused'``.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import custom_batching, lax
from jax.sharding import Mesh, PartitionSpec

Fn = Callable[[Any, Any], Any]
PROGRAMS: dict[str, tuple[Fn, str, str]] = {}


def program(a: str, b: str) -> Callable[[Fn], Fn]:
    """Puts a program into the table, with what it does to ``a`` and ``b``."""

    def add(fn: Fn) -> Fn:
        PROGRAMS[fn.__name__] = fn, a, b
        return fn

    return add


@program('flows', 'flows')
def product(a, b):
    return a * b


@program('stopped', 'flows')
def stopped(a, b):
    return lax.stop_gradient(a) * b


@program('flows', 'unused')
def itself_taken_from_itself(a, b):
    return a - a


@program('stopped', 'stopped')
def signs_and_rounding(a, b):
    return jnp.sign(a) + jnp.floor(b) * jnp.round(a)


@program('stopped', 'flows')
def integers(a, b):
    return a.astype(jnp.int32).astype(jnp.float32) * b


@program('stopped', 'flows')
def predicate(a, b):
    return jnp.where(a > 0, b, 1.0)


@program('stopped', 'flows')
def index(a, b):
    return b[jnp.argmax(a)] * jnp.ones(3)


@program('stopped', 'stopped')
def bits(a, b):
    raw = lax.bitcast_convert_type(a, jnp.int32)
    return lax.bitcast_convert_type(raw, jnp.float32) + lax.stop_gradient(b)


@program('flows', 'stopped')
def sorted_by_another(a, b):
    return lax.sort((b, a), num_keys=1)[1]


@program('stopped', 'flows')
def sorted_values(a, b):
    return lax.sort((b, a), num_keys=1)[0] + jnp.argsort(a).astype(jnp.float32)


@program('flows', 'flows')
def complex_numbers(a, b):
    return jnp.real(lax.complex(a, b) * (1 + 1j))


@program('flows', 'unused')
def dead_code(a, b):
    _ = a * b
    return a


@program('stopped', 'flows')
def jitted(a, b):
    inner = jax.jit(lambda a, b: (lax.stop_gradient(a), b * 2.0))
    outer = jax.jit(lambda a, b: inner(a, b))
    left, right = outer(a, b)
    return left + right


@program('stopped', 'flows')
def rematerialized(a, b):
    return jax.checkpoint(lambda a, b: jnp.sin(jnp.sign(a) * b))(a, b)


@program('flows', 'flows')
def derivative_inside(a, b):
    return jax.grad(lambda a: jnp.sum(a**2 * b))(a)


@program('unused', 'flows')
def derivative_that_loses_one(a, b):
    return jax.grad(lambda a: jnp.sum(a * b))(a)


@program('stopped', 'flows')
def batched(a, b):
    return jax.vmap(lambda x, y: lax.stop_gradient(x) * y)(a, b)


@program('flows', 'stopped')
def carried(a, b):
    def body(carry, x):
        kept, other = carry
        return (other, kept * lax.stop_gradient(b)), x

    return lax.scan(body, (a, jnp.ones(3)), None, length=3)[0][1]


@program('stopped', 'flows')
def scanned(a, b):
    def body(carry, x):
        left, right = x
        return carry + right, lax.stop_gradient(left) * carry

    last, each = lax.scan(body, jnp.zeros(()), (a, b))
    return last + each


@program('flows', 'stopped')
def scanned_constants(a, b):
    return (
        lax.scan(lambda c, _: (c * a, jnp.sign(b)), jnp.ones(3), length=2)[0]
        + (lax.scan(lambda c, _: (c, lax.stop_gradient(b) * c), 1.0, length=3)[1][0])
    )


@program('flows', 'stopped')
def reached_after_two_turns(a, b):
    def body(carry, _):
        first, second, third = carry
        return (a, first, second), third * lax.stop_gradient(b)

    return lax.scan(body, (jnp.ones(3),) * 3, None, length=4)[1][3]


@program('flows', 'stopped')
def while_loop(a, b):
    def more(carry):
        return jnp.sum(carry[1]) < jnp.sum(jnp.abs(b)) + 2.0

    def body(carry):
        return carry[0] * 0.5, carry[1] + 1.0

    return lax.while_loop(more, body, (a, jnp.zeros(3)))[0]


@program('flows', 'stopped')
def while_loop_with_constants(a, b):
    def body(carry):
        return carry[0] + 1, carry[1] * a + jnp.sign(b)

    return lax.while_loop(lambda carry: carry[0] < 2, body, (0, jnp.ones(3)))[1]


@program('stopped', 'flows')
def conditional(a, b):
    return lax.cond(jnp.sum(a) > 0, lambda b: b * 2.0, lambda b: b * 3.0, b)


@program('flows', 'stopped')
def one_of_the_branches(a, b):
    branches = [lambda a, b: jnp.sign(b), lambda a, b: a, lambda a, b: jnp.ones(3)]
    return lax.switch((b < 9.0).astype(jnp.int32)[0], branches, a, b)


@jax.custom_jvp
def jvp_of_one(a, b):
    return a * b


jvp_of_one.defjvps(lambda t, out, a, b: t * b, None)


@program('flows', 'stopped')
def custom_jvp(a, b):
    return jvp_of_one(a, b)


@program('flows', 'stopped')
def batched_custom_jvp(a, b):
    return jax.vmap(jvp_of_one, in_axes=(0, None))(a, b)[:, 0]


@jax.custom_vjp
def vjp_against_the_code(a, b):
    return lax.stop_gradient(a) * b


vjp_against_the_code.defvjp(
    lambda a, b: (a * b, (a, b)), lambda kept, g: (kept[1] * g, None)
)


@program('flows', 'stopped')
def custom_vjp(a, b):
    return vjp_against_the_code(a, b)


@program('flows', 'stopped')
def batched_custom_vjp(a, b):
    return jax.vmap(jax.jit(vjp_against_the_code))(a, b)


@jax.custom_vjp
def vjp_in_zeros(a, b):
    return a + b


vjp_in_zeros.defvjp(
    lambda a, b: (a + b, a), lambda a, g: (jax.jit(jnp.zeros_like)(a), 2.0 * g)
)


@program('stopped', 'flows')
def custom_vjp_with_zeros(a, b):
    return vjp_in_zeros(a, b)


@jax.custom_vjp
def vjp_constant(a, b):
    return b


vjp_constant.defvjp(lambda a, b: (b, None), lambda _, g: (jnp.ones(3), g))


@program('flows', 'flows')
def custom_vjp_out_of_nothing(a, b):
    return vjp_constant(a * 2.0, b)


@program('flows', 'flows')
def out_of_nothing_in_a_loop(a, b):
    def turn(carry, _):
        return jax.jit(vjp_constant)(2.0 * a, carry), None

    return lax.scan(turn, b, None, length=2)[0]


@program('flows', 'stopped')
def unreached_custom_vjp(a, b):
    return jnp.sign(vjp_constant(a, b))


@program('stopped', 'flows')
def custom_vmap(a, b):
    @custom_batching.custom_vmap
    def fn(a, b):
        return lax.stop_gradient(a) * b

    @fn.def_vmap
    def rule(size, batched, a, b):
        return fn(a, b), batched[0]

    return fn(a, b)


@program('flows', 'stopped')
def linear_solve(a, b):
    return jnp.linalg.solve(jnp.diag(lax.stop_gradient(b)), a)


@program('stopped', 'flows')
def sharded(a, b):
    mesh = Mesh(jax.devices()[:1], ('i',))
    spec = PartitionSpec('i')

    def each(a, b):
        return jnp.sign(a) * lax.psum(b, 'i')

    return jax.shard_map(each, mesh=mesh, in_specs=spec, out_specs=spec)(a, b)


@program('flows', 'unused')
def carried_in_vain(a, b):
    def turn(carry, _):
        x, y, _ = carry
        return (2.0 * x, 3.0 * y, b), None

    return lax.scan(turn, (a, b, b), length=2)[0][0]


@program('flows', 'unused')
def called_back_on_what_is_stopped(a, b):
    shape = jax.ShapeDtypeStruct((), jnp.float32)
    jax.debug.print('{}', b)
    return a * jax.pure_callback(lambda: jnp.float32(2.0), shape)


@program('flows', 'stopped')
def mutable_array(a, b):
    made = jax.new_ref(lax.stop_gradient(b))
    return a * made[...]


if not hasattr(jax, 'new_ref'):  # Older than JAX 0.8.
    del PROGRAMS['mutable_array']
