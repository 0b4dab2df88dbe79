"""What may be done to a model before or after a swap."""
