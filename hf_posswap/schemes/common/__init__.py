"""What several schemes share: bases, checks, pieces of mathematics."""
