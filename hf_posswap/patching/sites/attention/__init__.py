"""The attention site: queries, keys and scores."""
