"""Derivatives with respect to some leaves of pytrees, chosen by path at the call.

The selected leaves are taken out, JAX differentiates a function of these alone, and
the result is put into trees of the form of the arguments.
"""

from flax_sg.autodiff.gradients import grad as grad
from flax_sg.autodiff.gradients import hessian as hessian
from flax_sg.autodiff.gradients import jacfwd as jacfwd
from flax_sg.autodiff.gradients import jacrev as jacrev
from flax_sg.autodiff.gradients import value_and_grad as value_and_grad
from flax_sg.autodiff.linear_maps import jvp as jvp
from flax_sg.autodiff.linear_maps import linearize as linearize
from flax_sg.autodiff.linear_maps import vjp as vjp
