"""Archives to which a program adds entries one at a time, while it goes on."""
