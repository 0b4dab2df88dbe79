"""Planning: the edits that apply a scheme to a model, determined without touching it."""
