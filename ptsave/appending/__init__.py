"""Archives to which entries are added one at a time, while the program goes on."""
