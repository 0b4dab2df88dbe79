"""Pictures of position mechanisms, with or without a model, as drawn by `posswap show`."""
