"""What the demo claims, measured: on real gradients and on the traced program."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from flax_sg.demo import by_hand, data
from flax_sg.demo import model as models
from flax_sg.flow import GradientFlow, gradient_flow

Params = Mapping[str, Any]
Infer = Callable[[Params, jax.Array], tuple[jax.Array, models.Losses]]


@dataclasses.dataclass(frozen=True)
class Programs:
    """Three spellings of ``infer`` on one batch, from parameters and observation.

    Attributes:
        with_blocks: the model's own.
        with_copies: written by hand, with four copies of the weights.
        unstopped: written by hand, nothing stopped: what is left without the blocks.
    """

    with_blocks: Infer
    with_copies: Infer
    unstopped: Infer


@dataclasses.dataclass(frozen=True)
class Measured:
    """What was measured of a model.

    Attributes:
        trains: ``[3, 3]``, the largest absolute gradient of each loss (rows) with
            respect to each part (columns).
        trains_unstopped: the same without the blocks.
        code_to_params: the largest absolute cotangent that the codes of the
            all-stopped inference pass send to any parameter.
        code_to_observation: the same, to the observation.
        scans: the length of each scan in a training step.
        flow: which loss trains which parameter, as proven from the program.
        disproved: the parameters of which a real gradient says something else, with the
            loss: it is zero though the report says that it flows, or it is not.
        leaves: how many arrays were compared with those of the program by hand.
        different: the key paths of those that differ.
    """

    trains: NDArray[np.float32]
    trains_unstopped: NDArray[np.float32]
    code_to_params: float
    code_to_observation: float
    scans: list[int]
    flow: GradientFlow
    disproved: list[str]
    leaves: int
    different: list[str]


def programs(model: models.DigitModel, batch: data.Digits) -> Programs:
    """The programs to compare, with the batch's labels and the same random keys."""
    rngs = {'sampler': jax.random.key(5)}
    label = jnp.asarray(batch.labels)

    def with_blocks(params: Params, observation: jax.Array) -> Any:
        variables = {'params': params}
        return model.apply(variables, observation, label, rngs=rngs, method='infer')

    def with_copies(params: Params, observation: jax.Array) -> Any:
        return by_hand.infer(model, params, observation, label, rngs)

    def unstopped(params: Params, observation: jax.Array) -> Any:
        copies = by_hand.live_copies
        return by_hand.infer(model, params, observation, label, rngs, copies)

    return Programs(with_blocks, with_copies, unstopped)


def measure(model: models.DigitModel, params: Params, batch: data.Digits) -> Measured:
    """Measures a model on one batch."""
    spelled = programs(model, batch)
    args = params, jnp.asarray(batch.images)
    with_blocks = gradients(spelled.with_blocks, *args)
    with_copies = gradients(spelled.with_copies, *args)
    unstopped = gradients(spelled.unstopped, *args)
    code_to_params, code_to_observation = with_blocks.code
    report = flow(spelled.with_blocks, *args)
    return Measured(
        trains=largest_by_part(with_blocks),
        trains_unstopped=largest_by_part(unstopped),
        code_to_params=_largest(code_to_params),
        code_to_observation=_largest(code_to_observation),
        scans=scan_lengths(training_step(spelled.with_blocks), *args),
        flow=report,
        disproved=disproved(report, with_blocks),
        leaves=len(jax.tree.leaves(with_copies)),
        different=different_leaves(with_blocks, with_copies),
    )


class Gradients(NamedTuple):
    """Values of a program, and gradients, each ``(by parameters, by observation)``.

    Attributes:
        values: ``(code, losses)``, as ``infer`` returns them.
        total: of the sum of the losses, as in training.
        losses: of each loss alone, by the names in ``PARTS``.
        code: of the sum of all sampled codes, the outcome of the inference pass.
    """

    values: tuple[jax.Array, models.Losses]
    total: tuple[Params, jax.Array]
    losses: dict[str, tuple[Params, jax.Array]]
    code: tuple[Params, jax.Array]


def gradients(infer: Infer, params: Params, observation: jax.Array) -> Gradients:
    """Takes all gradients of a program, which is compiled once for all of them."""

    def weighted(params: Params, observation: jax.Array, weights: jax.Array) -> Any:
        code, losses = infer(params, observation)
        outputs = jnp.stack([*losses, jnp.sum(code)])
        return jnp.dot(weights, outputs), (code, losses)

    grad = jax.jit(jax.grad(weighted, argnums=(0, 1), has_aux=True))
    total, values = grad(params, observation, np.array([1, 1, 1, 0], np.float32))
    *losses, code = [
        grad(params, observation, alone)[0] for alone in np.eye(4, dtype=np.float32)
    ]
    return Gradients(values, total, dict(zip(models.PARTS, losses, strict=True)), code)


def largest_by_part(grads: Gradients) -> NDArray[np.float32]:
    """The largest absolute gradient of each loss with respect to each part.

    Returns:
        ``[3, 3]``: a row for each loss, a column for each part, as in ``PARTS``.
    """

    def row(by_module: Params) -> list[float]:
        parts = (by_hand.MODULES[part] for part in models.PARTS)
        return [_largest([by_module[name] for name in names]) for names in parts]

    return np.array([row(by_module) for by_module, _ in grads.losses.values()])


def flow(infer: Infer, params: Params, observation: jax.Array) -> GradientFlow:
    """Which loss trains which parameter: from the program, on shapes."""
    shapes = jax.eval_shape(lambda *args: args, params, observation)
    return gradient_flow(lambda *args: infer(*args)[1], *shapes)


def disproved(report: GradientFlow, grads: Gradients) -> list[str]:
    """Where a report and real gradients contradict each other."""
    return [
        f'{loss} -> {path}'
        for (loss, (by_params, _)), statuses in zip(
            grads.losses.items(), report.status, strict=True
        )
        for path, status, gradient in zip(
            report.parameters, statuses, jax.tree.leaves(by_params), strict=True
        )
        if bool(np.any(gradient)) != (status == 'flows')
    ]


def training_step(infer: Infer) -> Callable[..., Any]:
    """The gradient that a training step takes: of all losses, by the parameters."""
    return jax.grad(lambda *args: sum(infer(*args)[1]))


def different_leaves(one: Any, other: Any) -> list[str]:
    """The key paths at which two pytrees of arrays differ, be it in one bit.

    >>> different_leaves({'a': np.zeros(2)}, {'a': np.zeros(2)})
    []
    >>> different_leaves({'a': np.zeros(2)}, {'a': np.array([0, 1e-99])})
    ["['a']"]
    """

    def difference(path: Any, a: Any, b: Any) -> str | None:
        a, b = np.asarray(a), np.asarray(b)
        same = a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
        return None if same else jax.tree_util.keystr(path)

    # None is no leaf, so what is the same drops out.
    return jax.tree.leaves(jax.tree_util.tree_map_with_path(difference, one, other))


def scan_lengths(fun: Callable[..., Any], *args: Any) -> list[int]:
    """The length of each scan in a traced function, those in its callees included.

    >>> def thrice(x):
    ...     return jax.lax.scan(lambda carry, _: (carry * 2, None), x, length=3)[0]
    >>> scan_lengths(lambda x: thrice(jax.jit(thrice)(x)), 1.0)
    [3, 3]
    """

    def lengths(jaxpr: Any) -> Iterator[int]:
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == 'scan':
                yield eqn.params['length']
            # Both kinds of jaxpr, open and closed, show their equations.
            inner = jax.tree.leaves(eqn.params, is_leaf=lambda p: hasattr(p, 'eqns'))
            for value in inner:
                if hasattr(value, 'eqns'):
                    yield from lengths(value)

    return list(lengths(jax.make_jaxpr(fun)(*args)))


def _largest(tree: Any) -> float:
    return max(float(np.max(np.abs(leaf))) for leaf in jax.tree.leaves(tree))
