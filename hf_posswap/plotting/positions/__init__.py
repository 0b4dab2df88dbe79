"""Pictures of position mechanisms themselves, with a model or without: what `posswap show` draws."""
