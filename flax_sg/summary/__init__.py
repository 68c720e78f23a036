"""Lists the modules and variables of a model: ``sg.tabulate`` and ``sg.paths``."""

from flax_sg.summary.modules import ModuleTable as ModuleTable
from flax_sg.summary.modules import tabulate as tabulate
from flax_sg.summary.variables import Paths as Paths
from flax_sg.summary.variables import Variable as Variable
from flax_sg.summary.variables import paths as paths
