"""The demo: each loss trains its part, as in the same program written by hand."""

from typing import Any

import jax
import numpy as np
import optax
import pytest

from flax_sg import demo
from flax_sg.demo import data
from tests.helpers import oracle

SIZE = {'code_size': 3, 'hidden': 8, 'sampler_steps': 2}
SMALL = demo.DigitModel(**SIZE)


@pytest.fixture(scope='module')
def batch() -> data.Digits:
    images, labels = data.load()[0]
    return data.Digits(images[:16], labels[:16])


@pytest.fixture(scope='module')
def params():
    return demo.initial(SMALL)


def infer_by_hand(model: Any, params: Any, images: Any, labels: Any, key: Any) -> Any:
    """What the demo infers, with four copies of the weights, three of them stopped.

    Programs had to be written like this before there was flax_sg.
    """

    def call(trained: tuple[str, ...], method: str, *args: Any, **kwargs: Any) -> Any:
        weights = {
            name: module if name in trained else jax.lax.stop_gradient(module)
            for name, module in params.items()
        }
        return model.apply({'params': weights}, *args, method=method, **kwargs)

    code = call((), 'sample', images, rngs={'sampler': key})
    return code, demo.Losses(
        call(('reader_0', 'reader_1'), 'reader_loss', code, images, labels),
        call(('code_message', 'code_step'), 'code_loss', code, images),
        call(('explanation',), 'explanation_loss', code, images),
    )


@pytest.mark.usefixtures('standard_promotion')
def test_training_is_that_of_the_program_by_hand(params, batch):
    tx = optax.adam(optax.cosine_decay_schedule(1e-2, 3))

    def step(state, batch):
        params, opt_state = state
        images, labels, number = batch

        def total(params):
            key = jax.random.fold_in(jax.random.key(3), number)
            return sum(infer_by_hand(SMALL, params, images, labels, key)[1])

        updates, opt_state = tx.update(jax.grad(total)(params), opt_state)
        return (optax.apply_updates(params, updates), opt_state), None

    chosen = np.random.default_rng(2).integers(16, size=(3, demo.BATCH_SIZE))
    batches = batch.images[chosen], batch.labels[chosen], np.arange(3)
    scan = jax.jit(lambda *args: jax.lax.scan(step, *args))
    (expected, _), _ = scan((params, tx.init(params)), batches)
    oracle.assert_same(demo.train(SMALL, params, batch, 3), expected)


def run(model: Any, share: float | None, patch: Any, capsys: Any) -> Any:
    """The demo of a small model, trained for three steps: its status and its lines."""
    patch.setattr(demo, 'DigitModel', lambda: model)
    patch.setattr(demo, 'STEPS', 3)
    if share is not None:
        patch.setattr(demo, 'accuracy', lambda *_: share)
    with jax.numpy_dtype_promotion('standard'):
        status = demo.main([])
    return status, capsys.readouterr().out.splitlines()


def test_a_run_of_the_demo(monkeypatch, capsys):
    status, lines = run(SMALL, 0.9, monkeypatch, capsys)
    assert status == 0
    assert max(map(len, lines)) <= 80
    table = {words[0]: words[1:4] for words in map(str.split, lines) if words}
    assert table['code_message'] == ['stopped', 'trains', 'stopped']
    assert table['code_step'] == table['code_message']
    assert table['reader_0'] == ['trains', 'stopped', 'stopped']
    assert table['reader_1'] == ['trains', '-', '-']  # Only labels are read with it.
    assert lines[-5:] == [
        '  reader       reader_0, reader_1',
        '  code         code_message, code_step',
        '  explanation  explanation',
        '',
        'The reader recognises 0.900 of the held-out digits (as expected).',
    ]


class NoBlocks(demo.DigitModel):
    def infer(self, observation, label):
        code = self.sample(observation)
        return code, demo.Losses(
            self.reader_loss(code, observation, label),
            self.code_loss(code, observation),
            self.explanation_loss(code, observation),
        )


def test_the_demo_fails_if_a_loss_trains_another_part(monkeypatch, capsys):
    status, lines = run(NoBlocks(**SIZE), 1.0, monkeypatch, capsys)
    assert status == 1
    trained = 'code_message, code_step, explanation, reader_0, reader_1'
    assert f'  reader       {trained}' in lines


def test_the_demo_fails_if_the_model_has_not_learned(monkeypatch, capsys):
    status, lines = run(SMALL, None, monkeypatch, capsys)
    assert status == 1
    assert lines[-3].strip() == 'explanation  explanation'
    assert lines[-1].endswith('of the held-out digits (too few: 0.9 were expected).')
