"""The embedding site: the additive position table."""
