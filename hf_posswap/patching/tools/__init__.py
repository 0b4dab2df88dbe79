"""Operations on a model before or after a swap."""
