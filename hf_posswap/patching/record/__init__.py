"""What was done to a model, as JSON in its config, and what keeps a checkpoint from being loaded without it."""
