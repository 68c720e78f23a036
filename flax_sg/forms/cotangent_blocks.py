"""Rules that change the cotangent of a parameter: scale, clip, replace, copy, print."""

from __future__ import annotations

from flax_sg.forms.block_decorator import takes_target
from flax_sg.rules import rewrites

map_cotangent = takes_target(rewrites.map_cotangent)
scale_gradient = takes_target(rewrites.scale_gradient)
reverse_gradient = takes_target(rewrites.reverse_gradient)
clip_gradient = takes_target(rewrites.clip_gradient)
print_cotangent = takes_target(rewrites.print_cotangent)
replace_cotangent = takes_target(rewrites.replace_cotangent)
copy_cotangent = takes_target(rewrites.copy_cotangent)
