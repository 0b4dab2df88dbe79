"""Planning: which edits put a scheme into a model, found without touching it."""
