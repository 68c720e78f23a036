"""What is frozen, for optimizers: masks, labels, a transformation, its state."""
