"""Views of NNX models, and filters for them. Flax calls such a model a graph."""
