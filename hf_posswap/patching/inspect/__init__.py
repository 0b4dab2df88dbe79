"""What position mechanism a model has, and what could be put in its place."""
