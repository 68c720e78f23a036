"""diffusers: a UNet of which only the cross-attention is trained."""

import diffusers
import jax
import jax.numpy as jnp
import steps

model = diffusers.FlaxUNet2DConditionModel(
    sample_size=8,
    in_channels=4,
    out_channels=4,
    down_block_types=('CrossAttnDownBlock2D', 'DownBlock2D'),
    up_block_types=('UpBlock2D', 'CrossAttnUpBlock2D'),
    block_out_channels=(32, 64),
    layers_per_block=1,
    attention_head_dim=8,
    cross_attention_dim=16,
)
params = model.init_weights(jax.random.PRNGKey(0))
noise, noisy, text = (
    jax.random.normal(jax.random.key(n), shape)
    for n, shape in enumerate([(2, 4, 8, 8), (2, 4, 8, 8), (2, 5, 16)])
)
times = jnp.array([3, 7])


def loss(params):
    predicted = model.apply({'params': params}, noisy, times, text).sample
    return jnp.mean((predicted - noise) ** 2)


steps.check(
    'diffusers, FlaxUNet2DConditionModel',
    loss,
    params,
    in_model=~steps.sg.filters.as_filter('**/attn2/**'),
    in_tree=~steps.sg.filters.as_filter('**/attn2/**'),
    is_frozen=lambda path: '/attn2/' not in path,
)
