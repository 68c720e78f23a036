"""What is frozen, for optimizers: masks, labels, ``freeze`` and ``adopt``."""
