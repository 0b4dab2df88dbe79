"""What to use for which model, length and budget: rules that rest on the project's own measured figures."""
