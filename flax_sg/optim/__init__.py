"""What is frozen, for optimizers: masks, labels, a wrapper, a train state."""
