"""Plug-ins for other libraries: import the module named after the library."""
