"""Which output of a function trains which parameter, proven from its jaxpr."""

from flax_sg.flow.analysis import gradient_flow as gradient_flow
from flax_sg.flow.derived import live as live
from flax_sg.flow.report import GradientFlow as GradientFlow
from flax_sg.flow.report import Why as Why
