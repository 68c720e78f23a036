"""Assertions for users' tests: they pass, they fail, and the message says why."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as fnn

from flax_sg import errors, testing
from flax_sg.internals import jaxprs
from tests.helpers.reports import LINE, LOSSES, WAY, report

X = jnp.linspace(-1.0, 1.0, 6).reshape(2, 3)

# Programs.


def test_names_and_places_are_no_part_of_a_program():
    class Other(fnn.Module):
        @fnn.compact
        def __call__(self, x):
            with jax.named_scope('elsewhere'):
                return fnn.Dense(2, name='another')(x)

    class Bare(fnn.Module):
        @fnn.compact
        def __call__(self, value):
            return fnn.Dense(2, name='another')(value)

    params = jax.eval_shape(Bare().init, jax.random.key(0), X)
    testing.assert_same_program(Other().apply, jax.jit(Bare().apply), params, X)


FUSED = """HloModule jit_f, frontend_attributes={fingerprint_before_lhs="%s",x="y"}

%%fused (a: f32[2], b: f32[3]) -> f32[3] {
%s
  ROOT %%c = f32[3]{0} custom-call(%%a, %%b), backend_config="%%z = parameter(1)"
}

ENTRY %%main (p: f32[2]) -> f32[2] {
  %%one = f32[] constant(1)
  ROOT %%p = f32[2]{0} parameter(0)
}
"""
A, B = '  %a = f32[2]{0} parameter(0)', '  %b = f32[3]{0} parameter(1)'


def hlo(monkeypatch, text):
    monkeypatch.setattr(jaxprs, 'program_text', lambda _: text)
    return testing.optimized_hlo(jax.jit(jnp.sin).lower(1.0).compile())


def test_where_parameters_stand_and_fingerprints_are_no_part_of_a_program(monkeypatch):
    """The compilers of GPUs and TPUs have parameters of a body in any order."""
    one = hlo(monkeypatch, FUSED % ('c83f', f'{A}\n{B}'))
    assert one == hlo(monkeypatch, FUSED % ('ebba', f'{B}\n{A}'))
    assert one.splitlines() == [
        'HloModule, frontend_attributes={x="y"}',
        '',
        '%0 (f32[2], f32[3]) -> f32[3] {',
        '  %1 = f32[2]{0} parameter(0)',
        '  %2 = f32[3]{0} parameter(1)',
        '  ROOT %3 = f32[3]{0} custom-call(%1, %2), backend_config="%4 = parameter(1)"',
        '}',
        '',
        'ENTRY %5 (f32[2]) -> f32[2] {',
        '  ROOT %6 = f32[2]{0} parameter(0)',
        '  %7 = f32[] constant(1)',
        '}',
    ]
    # What a parameter is, and the order in which the others are read, is a part of it.
    for other in (f'{A}\n{B}'.replace('(1)', '(2)'), f'{B}\n{A}'.replace('[2]', '[4]')):
        assert one != hlo(monkeypatch, FUSED % ('c83f', other))
    swapped = (FUSED % ('c83f', f'{A}\n{B}')).replace('(%a, %b)', '(%b, %a)')
    assert one != hlo(monkeypatch, swapped)


def test_the_settings_of_an_instruction_have_no_order(monkeypatch):
    """A GPU's program in JAX's cache has those of a loop the other way round."""
    loop = 'ROOT %%l = f32[] while(), body=%%b, backend_config=%s, metadata={"}"}'
    one = loop % '{"known_trip_count":{"n":"4"},"dynamic_variables":[]}'
    other = loop % '{"dynamic_variables":[],"known_trip_count":{"n":"4"}}'
    texts = [hlo(monkeypatch, f'HloModule m\n{text}') for text in (one, other)]
    assert texts[0] == texts[1]
    assert texts[0] != hlo(monkeypatch, f'HloModule m\n{one}'.replace('4', '5'))
    # Those of a kernel of Triton are no JSON.
    kernel = loop % '{grid_x = 4 : i32, name = "a"}'
    text = hlo(monkeypatch, f'HloModule m\n{kernel}')
    assert 'backend_config={grid_x = 4 : i32, name = "a"}, metadata={"}"}' in text


def test_constants_are_part_of_a_program():
    """HLO as text leaves out the values of all but the smallest."""
    one = np.arange(16, dtype=np.float32) ** 2
    other = one + np.eye(16, dtype=np.float32)[7]
    testing.assert_same_program(lambda x: x * one, lambda x: x * one.copy(), one)
    with pytest.raises(errors.ExpectationError, match='different programs'):
        testing.assert_same_program(lambda x: x * one, lambda x: x * other, one)


def first(value):
    return lambda x: (jax.debug.callback(lambda v: print(v, value), x), x)[1]


DIFFERENT = {
    'parameters': (lambda p, x: p['a'] * x, lambda p, x: p['b'] * x),
    'arguments': (lambda p, x: p['a'], lambda p, x: x),
    'callbacks': (
        lambda p, x: jax.pure_callback(np.sin, x, x),
        lambda p, x: jax.pure_callback(np.cos, x, x),
    ),
    'prints': (
        lambda p, x: (jax.debug.print('a {}', x), x)[1],
        lambda p, x: (jax.debug.print('b {}', x), x)[1],
    ),
    'closures': (lambda p, x: first(1)(x), lambda p, x: jax.jit(first(2))(x)),
}


@pytest.mark.parametrize('name', DIFFERENT)
def test_arguments_and_callbacks_are_compared(name):
    one, other = DIFFERENT[name]
    params = {'a': X, 'b': X}
    testing.assert_same_program(one, jax.jit(lambda p, x: one(p, x)), params, X)
    with pytest.raises(
        errors.ExpectationError, match=r'different (arguments|functions)'
    ):
        testing.assert_same_program(one, other, params, X)


def test_the_settings_of_jit_are_compared():
    plain, donating = jax.jit(jnp.cos), jax.jit(jnp.cos, donate_argnums=0)
    with pytest.raises(errors.ExpectationError):
        testing.assert_same_program(plain, donating, X)
    static = jax.jit(lambda x, n: x * n, static_argnums=1)
    testing.assert_same_program(static.lower(X, 3).compile(), lambda x: x * 3, X)


# Flows.

HOLDS = [
    (testing.assert_flows, 'gln_0/**', 'gln'),
    (testing.assert_flows, 'gln_0/**', None),
    (testing.assert_flows, True, None),
    (testing.assert_flows, 'scale', '*'),
    (testing.assert_stopped, ['gln_0/**', 'head/**'], 'code'),
    (testing.assert_stopped, 'gln_0/**', ['code', 'explanation']),
    (testing.assert_trains_only, ['gln_0/**', 'head/bias', 'scale'], 'gln'),
    (testing.assert_trains_only, True, None),
]


def test_what_holds_passes_and_its_opposite_fails():
    stopped, flows = testing.assert_stopped, testing.assert_flows
    for holds, where, output in HOLDS:
        holds(LOSSES, where, output=output)
        with pytest.raises(AssertionError):
            (flows if holds is stopped else stopped)(LOSSES, where, output=output)
    # Only means no less and no more.
    for where in (['gln_0/**', 'head/bias'], ['gln_0/**', 'head/*', 'scale'], True):
        with pytest.raises(AssertionError):
            testing.assert_trains_only(LOSSES, where, output='gln')


def message(holds, flow, *args, **kwargs) -> str:
    with pytest.raises(errors.ExpectationError) as info:
        holds(flow, *args, **kwargs)
    return str(info.value)


def test_other_arguments_than_the_first():
    def loss(x, encoder, head):
        return jnp.sum(jax.lax.stop_gradient(encoder * x) * head)

    a = jnp.ones(2)
    testing.assert_flows(loss, True, a, a, a, argnums=2)
    testing.assert_stopped(loss, True, a, a, a, argnums=(0, 1))
    testing.assert_trains_only(loss, '2', a, a, a, argnums=(1, 2))
    with pytest.raises(errors.ExpectationError, match=r'does not train 1\.'):
        testing.assert_flows(loss, '1', a, a, a, argnums=(1, 2))


def test_a_failing_assertion_names_parameters_and_lines():
    only, stopped = testing.assert_trains_only, testing.assert_stopped
    where = ['gln_0/**', 'head/*']
    assert message(only, LOSSES, where, output='gln') == (
        "Expected a gradient to Glob('gln_0/**') | Glob('head/*') and to nothing else."
        "\nOutput 'gln' does not train head/kernel.\n"
        f'head/kernel is used at {LINE}.\n'
        'It is stopped by round at model.py:32 (Net.__call__).\n'
        "Output 'gln' trains scale.\n"
        f'scale is used at {LINE}.'
    )
    assert message(stopped, LOSSES, 'scale', output='*').splitlines()[1:] == [
        f'{line}'
        for name in LOSSES.outputs
        for line in (f'Output {name!r} trains scale.', f'scale is used at {LINE}.')
    ]
    paths = [f'layer_{n}/{name}' for n in range(20) for name in ('bias', 'kernel')]
    flow = report({'': ['flows'] * 40}, paths, WAY)
    assert message(stopped, flow, True) == (
        'Expected no gradient to True.\n'
        'The loss trains layer_0/bias, layer_0/kernel, layer_1/bias and 37 more.\n'
        f'layer_0/bias is used at {LINE}.'
    )


def test_what_no_output_uses_is_not_trained():
    flow = report({'a': ['unused'], 'b': ['unused']}, ['dense/kernel'])
    testing.assert_stopped(flow, True)
    testing.assert_stopped(flow, True, output='a')
    assert message(testing.assert_flows, flow, 'dense/**') == (
        "Expected a gradient to 'dense/**'.\n"
        'The loss does not train dense/kernel.\ndense/kernel is not used.'
    )


def test_leaves_without_a_gradient_are_free():
    shapes = (jax.ShapeDtypeStruct((), jnp.int32), *LOSSES.shapes[1:])
    flow = dataclasses.replace(LOSSES, shapes=shapes, status=(LOSSES.status[2],) * 3)
    testing.assert_flows(flow, ['gln_0/**', 'head/**'], output='gln')
    testing.assert_trains_only(flow, ['gln_0/**', 'head/**', 'scale'])
    with pytest.raises(errors.ArgumentTypeError, match=r'int32\[\]'):
        testing.assert_flows(flow, 'gln_0/**')
    testing.assert_stopped(flow, 'gln_0/**')


def test_a_program_that_no_compiler_counts_is_counted_as_for_a_cpu():
    """As for a GPU that is not there."""
    compiled = jax.jit(lambda x: x @ x).lower(jnp.ones((4, 4))).compile()
    uncounted = types.SimpleNamespace(
        cost_analysis=lambda: None, runtime_executable=compiled.runtime_executable
    )
    found = jaxprs.counts(compiled)
    assert found['flops'] == jaxprs.counts(uncounted)['flops'] == 2 * 4**3


def test_keyword_arguments_of_the_loss():
    """They are traced, or a choice of Python, as in ``sg.gradient_flow``."""

    def loss(params, x, *, train, scale=1.0):
        code = params['code'] * x if train else jax.lax.stop_gradient(params['code'])
        return jnp.sum(code * params['head'] * scale)

    params, scale = {'code': jnp.ones(3), 'head': jnp.ones(3)}, jnp.ones(3)
    testing.assert_flows(loss, 'code', params, X[0], train=True)
    testing.assert_stopped(loss, 'code', params, X[0], train=False, scale=scale)
    testing.assert_trains_only(loss, 'head', params, X[0], train=False)
    for holds in (testing.assert_flows, testing.assert_trains_only):
        with pytest.raises(errors.ExpectationError):
            holds(loss, 'code', params, X[0], train=False)


def test_an_assertion_takes_wrt_as_a_report_does():
    params = {'a': jnp.ones(2), 'b': jnp.ones(2)}
    loss = lambda params: jnp.sum(params['a'] * params['b'])  # noqa: E731
    testing.assert_trains_only(loss, 'a', params, wrt='a')
    with pytest.raises(AssertionError, match='trains b'):
        testing.assert_trains_only(loss, 'a', params)
