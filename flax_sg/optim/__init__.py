"""What is frozen, for optimizers: masks, labels, a wrapper, a train state."""

from flax_sg.optim.freezing import Freeze as Freeze
from flax_sg.optim.freezing import FreezeState as FreezeState
from flax_sg.optim.freezing import freeze as freeze
from flax_sg.optim.freezing import thaw as thaw
from flax_sg.optim.masks import labels as labels
from flax_sg.optim.masks import mask as mask
from flax_sg.optim.updates import TrainState as TrainState
from flax_sg.optim.updates import apply_updates as apply_updates
