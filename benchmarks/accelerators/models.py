"""A language model of any size: scanned, rematerialized layers between two tables."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from benchmarks.models import Stop, no_stop
from benchmarks.selections import Selection

# What is frozen below a trained head, and below adapters.
BACKBONE = Selection.of('(embed|layers)/.*')
ADAPTED = Selection.of('embed/.*|layers/.*(base/.*|scale)')
RANK = 16


class Base(nn.Module):
    """A product with a weight, of floats or of int8.

    Attributes:
        features: the width of the result.
        bits: 32, or 8 for a weight in int8 with a scale for each feature.
        names: the mesh axes of the weight, which is in a box of them.
        fetch: brings the weight to where it is used: from the memory of the host, or
            from other devices.
    """

    features: int
    bits: int = 32
    names: tuple[str | None, ...] = ()
    fetch: Any = staticmethod(lambda kernel: kernel)

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """``x @ kernel``."""
        init: Any = nn.initializers.lecun_normal()
        shape = x.shape[-1], self.features
        if self.bits == 8:
            kernel = self.param('kernel', nn.initializers.ones, shape, jnp.int8)
            scale = self.param('scale', nn.initializers.ones, shape[1:])
            return x @ (kernel.astype(x.dtype) * scale.astype(x.dtype))
        if self.names:
            init = nn.with_partitioning(init, self.names)
        kernel = self.fetch(self.param('kernel', init, shape))
        return x @ kernel.astype(x.dtype)


class Adapted(nn.Module):
    """A product with a base weight, and of rank ``rank`` beside it; none for 0."""

    features: int
    rank: int = 0
    bits: int = 32
    names: tuple[str | None, ...] = ()
    fetch: Any = Base.fetch

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """The sum of both."""
        fields = self.features, self.bits, self.names, self.fetch
        y = Base(*fields, name='base')(x)
        if not self.rank:
            return y
        normal = nn.initializers.normal()
        down = self.param('down', normal, (x.shape[-1], self.rank)).astype(x.dtype)
        up = self.param('up', normal, (self.rank, self.features)).astype(x.dtype)
        return y + x @ down @ up


class Layer(nn.Module):
    """A layer of a decoder, with the signature of a scan body.

    Attributes:
        width: the width of the model.
        heads: the number of heads.
        rank: the rank of the adapters; 0 for none.
        bits: as for ``Base``.
        boxes: whether weights are in boxes, sharded by 'data' and 'model'.
        fetch: as for ``Base``.
        attention: takes queries, keys and values.
        spread: says where activations are, as a sharding constraint does.
    """

    width: int
    heads: int
    rank: int = 0
    bits: int = 32
    boxes: bool = False
    fetch: Any = Base.fetch
    attention: Any = staticmethod(
        lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=True)
    )
    spread: Any = staticmethod(lambda x: x)

    @nn.compact
    def __call__(self, x: jax.Array, _: Any = None) -> tuple[jax.Array, None]:
        """Attention and two dense layers, each around a residual."""

        def product(name: str, features: int, x: jax.Array) -> jax.Array:
            out = 'out' in name
            names = ('model', 'data') if out else ('data', 'model')
            names = names if self.boxes else ()
            fields = features, self.rank, self.bits, names, self.fetch
            return self.spread(Adapted(*fields, name=name)(x))

        shape = *x.shape[:2], self.heads, self.width // self.heads
        h = nn.RMSNorm(name='norm_0')(x).astype(x.dtype)
        q, k, v = (product(n, self.width, h).reshape(shape) for n in 'qkv')
        mixed = self.attention(q, k, v).reshape(x.shape)
        x = x + product('out', self.width, mixed)
        h = nn.RMSNorm(name='norm_1')(x).astype(x.dtype)
        wide = nn.gelu(product('wide', 4 * self.width, h))
        return x + product('wide_out', self.width, wide), None


class Decoder(nn.Module):
    """The mean loss of the next token.

    Attributes:
        depth: the number of layers.
        width: the width of each.
        heads: the number of heads.
        vocabulary: the number of tokens.
        rank: as for ``Layer``.
        bits: as for ``Layer``.
        boxes: as for ``Layer``.
        fetch: as for ``Base``.
        lookup: whether tokens are looked up; otherwise products with them do it, since
            ``nn.Embed`` takes no explicit shardings.
        by_hand: how many layers are frozen in a scan of their own, by hand.
        stop: opens a block around the frozen part.
        frozen: the filter of the block.
        scan: ``nn.scan``, or a function with the same arguments.
        wrap: wraps the scanned layers, as ``nn.Frozen`` does.
        attention: as for ``Layer``.
        spread: as for ``Layer``.
    """

    depth: int
    width: int
    heads: int = 4
    vocabulary: int = 512
    rank: int = 0
    bits: int = 32
    boxes: bool = False
    fetch: Any = Base.fetch
    lookup: bool = True
    by_hand: int = 0
    stop: Stop = no_stop
    frozen: Any = ()
    scan: Any = nn.scan
    wrap: Any = staticmethod(lambda module: module)
    attention: Any = Layer.attention
    spread: Any = Layer.spread

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """The loss of a batch of tokens."""
        fields = (
            self.width,
            self.heads,
            self.rank,
            self.bits,
            self.boxes,
            self.fetch,
            self.attention,
            self.spread,
        )
        scanned = self.scan(
            nn.remat(Layer, prevent_cse=False),
            variable_axes={'params': 0},
            split_rngs={'params': True},
            length=self.depth,
            metadata_params={nn.PARTITION_NAME: None},
        )
        hot = None if self.lookup else jax.nn.one_hot(tokens, self.vocabulary)
        with self.stop(self.frozen):
            embed = nn.Embed(self.vocabulary, self.width, name='embed')
            x = embed(tokens) if self.lookup else hot @ self.fetch(embed.embedding)
            x = self.spread(x.astype(jnp.bfloat16))
            if self.by_hand and not self.is_initializing():
                x = self.two_scans(Layer(*fields, parent=None), x)
            else:
                layers = scanned(*fields, name='layers')
                x, _ = self.wrap(layers)(x, None)
        head = Adapted(self.vocabulary, fetch=self.fetch, name='head')
        logits = self.spread(head(x))
        logits = logits.astype(jnp.float32)
        if hot is None:
            chosen = jnp.take_along_axis(logits, tokens[..., None], -1)[..., 0]
        else:
            chosen = jnp.sum(hot * logits, -1)
        return jnp.mean(jax.nn.logsumexp(logits, -1) - chosen)

    def two_scans(self, layer: nn.Module, x: jax.Array) -> jax.Array:
        """The layers as two scans, of which the first trains nothing."""
        stack = self.variables['params']['layers']

        def run(params: Any, x: jax.Array) -> jax.Array:
            return layer.apply({'params': params}, x)[0]

        run = jax.checkpoint(run, prevent_cse=False)
        stopped = jax.lax.stop_gradient(stack)

        def frozen(x: jax.Array, number: jax.Array) -> tuple[jax.Array, None]:
            index = jax.lax.dynamic_index_in_dim
            params = jax.tree.map(lambda w: index(w, number, keepdims=False), stopped)
            return run(params, x), None

        x, _ = jax.lax.scan(frozen, x, jnp.arange(self.by_hand, dtype=jnp.uint32))
        live = jax.tree.map(lambda w: w[self.by_hand :], stack)
        return jax.lax.scan(lambda x, w: (run(w, x), None), x, live)[0]
