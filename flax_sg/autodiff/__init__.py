"""Derivatives with respect to some leaves of pytrees, chosen by path at the call.

The selected leaves are taken out, JAX differentiates a function of these alone, and
the result is put into trees of the form of the arguments.
"""

from flax_sg.autodiff.calls import jvp as jvp
from flax_sg.autodiff.calls import linearize as linearize
from flax_sg.autodiff.calls import vjp as vjp
from flax_sg.autodiff.derivatives import grad as grad
from flax_sg.autodiff.derivatives import value_and_grad as value_and_grad
from flax_sg.autodiff.jacobians import hessian as hessian
from flax_sg.autodiff.jacobians import jacfwd as jacfwd
from flax_sg.autodiff.jacobians import jacrev as jacrev
