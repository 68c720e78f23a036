"""What programs call that test JAX's caches: nets, and pairs of parts that hold nets.

Each function calls ``note`` when its Python runs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.linen as fnn
import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict
from jax import lax

X = jnp.linspace(-1.0, 1.0, 4).reshape(2, 2)


def net_class(note: Callable[[], None]) -> type[fnn.Module]:
    class Net(fnn.Module):
        @fnn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            note()
            x = jnp.tanh(fnn.Dense(2, name='enc')(x))
            return fnn.Dense(2, name='head')(x)

    return Net


def _apply(net: Any) -> Callable[..., Any]:
    model = net(parent=None)
    return lambda params, x: model.apply({'params': params}, x)


def _scan(fn: Callable[..., Any]) -> Callable[..., Any]:
    def body(carry: Any, _: None) -> Any:
        params, x = carry
        return (params, fn(params, x)), None

    return lambda params, x: lax.scan(body, (params, x), None, length=2)[0][1]


def _custom_vjp(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A function whose rule reads the parameters when the block has closed."""
    out = jax.custom_vjp(fn)

    def forward(params: Any, x: Any) -> Any:
        return fn(params, x), (params, x)

    def backward(given: Any, ct: Any) -> Any:
        return jax.vjp(fn, *given)[1](ct)

    out.defvjp(forward, backward)
    return out


def step(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A compiled step of training, up to the gradients."""
    return jax.jit(jax.grad(lambda params, x: jnp.sum(fn(params, x) ** 2), (0, 1)))


@dataclasses.dataclass(frozen=True)
class Kind:
    """A way to call a network.

    Attributes:
        make: from the class of the network to a function of its parameters and input.
        cached: whether JAX or Flax traces it once only.
        eager: whether a part of it runs in Python at every call. The stops are then in
            that part, and all answers may share the compiled part.
        late: whether a rule of it runs in the backward pass, which is not counted.
    """

    make: Callable[[Any], Callable[..., Any]]
    cached: bool = True
    eager: bool = False
    late: bool = False


KINDS: dict[str, Kind] = {
    'jit': Kind(lambda net: jax.jit(_apply(net))),
    'checkpoint of jit': Kind(lambda net: jax.checkpoint(jax.jit(_apply(net)))),
    'jit of scan': Kind(lambda net: jax.jit(_scan(_apply(net)))),
    'nn.jit': Kind(lambda net: _apply(fnn.jit(net)), eager=True),
    'nn.remat of nn.jit': Kind(lambda net: _apply(fnn.remat(fnn.jit(net))), eager=True),
    'plain': Kind(_apply, cached=False, eager=True),
    'jit of custom_vjp': Kind(lambda net: jax.jit(_custom_vjp(_apply(net))), late=True),
}
STEP = Kind(lambda net: step(_apply(net)))
# The nets in each part of a pair, and how these are called.
CHILDREN: dict[str, Kind] = {
    'net': Kind(lambda net: net, cached=False, eager=True),
    'both': Kind(lambda net: fnn.remat(fnn.jit(net)), eager=True),
}
# What a function of ``x`` that reads a bound module is wrapped in.
RAW: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    'jit': jax.jit,
    'checkpoint': jax.checkpoint,
}


def pair_class(net: type[fnn.Module]) -> type[fnn.Module]:
    """Two equal parts, in whose methods a program can be."""
    # ``nn.jit`` and ``nn.remat`` make a new class at each call.
    classes = {name: kind.make(net) for name, kind in CHILDREN.items()}

    class Part(fnn.Module):
        def setup(self) -> None:
            for name, cls in classes.items():
                setattr(self, name, cls())
            self.kept = jnp.tanh(self.param('w', fnn.initializers.normal(), (2, 2)))

        def use_kept(self, x: jax.Array) -> jax.Array:
            return x * self.kept

        def run(self, body: Callable[[], Any]) -> Any:
            return body()

    class Pair(fnn.Module):
        def setup(self) -> None:
            self.a, self.b = Part(), Part()

        def run(self, body: Callable[[Any], Any]) -> Any:
            # Otherwise the trace of a closure would make, and leave behind, what a
            # part keeps.
            for part in (self.a, self.b):
                _ = part.kept
            return body(self)

        def __call__(self, x: jax.Array) -> list[jax.Array]:
            return [getattr(part, c)(x) for part in (self.a, self.b) for c in classes]

    return Pair


# For programs by hand, which do not count.
NET = net_class(lambda: None)
PAIR = pair_class(NET)()
BY_HAND = {name: kind.make(NET) for name, kind in KINDS.items()}

NET_PARAMS = NET().init(jax.random.key(0), X)['params']
PAIR_PARAMS = PAIR.init(jax.random.key(1), X)['params']
NET_PATHS, PAIR_PATHS = (list(flatten_dict(p)) for p in (NET_PARAMS, PAIR_PARAMS))
