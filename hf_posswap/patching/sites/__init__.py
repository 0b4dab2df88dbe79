"""The three places where a model may keep positions: its additive table, its rotary modules, its attention."""
