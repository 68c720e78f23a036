"""transformers: a BERT classifier with a frozen encoder, in training mode."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import steps
import transformers

config = transformers.BertConfig(
    vocab_size=64,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=48,
    max_position_embeddings=16,
    num_labels=3,
)
model = transformers.FlaxBertForSequenceClassification(config, input_shape=(1, 8))
random = np.random.default_rng(0)
tokens = random.integers(0, 64, (4, 8))
labels = jnp.asarray(random.integers(0, 3, 4))


def loss(params):
    key = jax.random.key(1)
    out = model(tokens, params=params, dropout_rng=key, train=True)
    losses = optax.softmax_cross_entropy_with_integer_labels(out.logits, labels)
    return jnp.mean(losses)


steps.check(
    'transformers, FlaxBertForSequenceClassification',
    loss,
    model.params,
    in_model=['bert/embeddings/**', 'bert/encoder/**'],
    in_tree=['bert/embeddings/**', 'bert/encoder/**'],
    is_frozen=lambda path: path.startswith(('bert/embeddings/', 'bert/encoder/')),
)
