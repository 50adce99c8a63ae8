"""A run saved and resumed."""
