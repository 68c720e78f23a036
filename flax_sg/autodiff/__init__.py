"""Derivatives with respect to some leaves of pytrees, chosen by path at the call.

The selected leaves are taken out, JAX differentiates a function of these alone, and
the result is put into trees of the form of the arguments.
"""
