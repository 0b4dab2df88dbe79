"""Text to train and to evaluate on: where it comes from, and its tokens."""
