"""What a checkpoint's positions become in other programs, and the config that each of them wants."""
