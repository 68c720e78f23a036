"""What a reader sees of a variable, and what comes back in the backward pass."""
