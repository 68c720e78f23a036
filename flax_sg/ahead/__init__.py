"""A loss in two programs: what does not change is computed once."""

from flax_sg.ahead.precomputed import Precomputed as Precomputed
from flax_sg.ahead.precomputed import precompute as precompute
