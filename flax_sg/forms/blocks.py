"""All rules as blocks and decorators of linen.

Their docstrings, which users read, are in ``rules/value_rewrites.py`` and
``cotangent_rewrites.py``.
"""

from __future__ import annotations

from flax_sg.forms.block_decorator import takes_target
from flax_sg.rules import cotangent_rewrites, value_rewrites

stop_gradient = takes_target(value_rewrites.stop_gradient)
train_only = takes_target(value_rewrites.train_only)
read_only = takes_target(value_rewrites.read_only)
substitute = takes_target(value_rewrites.substitute)
map_cotangent = takes_target(cotangent_rewrites.map_cotangent)
scale_gradient = takes_target(cotangent_rewrites.scale_gradient)
reverse_gradient = takes_target(cotangent_rewrites.reverse_gradient)
clip_gradient = takes_target(cotangent_rewrites.clip_gradient)
print_cotangent = takes_target(cotangent_rewrites.print_cotangent)
replace_cotangent = takes_target(cotangent_rewrites.replace_cotangent)
copy_cotangent = takes_target(cotangent_rewrites.copy_cotangent)
