"""The rotary site: the model's own rotary modules."""
