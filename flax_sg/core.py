"""Rewrites on the scopes of ``flax.core``, for models that are written without linen.

``lift`` takes any rewrite to a function of a scope; ``stop_gradient`` is a short form.
"""

from flax_sg.forms.on_scopes import lift as lift
from flax_sg.forms.on_scopes import stop_gradient as stop_gradient
