"""What people write: blocks, lifted classes and functions, Frozen, mirror, trees."""
