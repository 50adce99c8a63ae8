"""Engines: the extension module ``_C``, compiled for each minor series of torch, such as 2.13.

A wheel contains an engine for each series that existed when the wheel was built, in folders beside
this file.  `ptsave.build_engine` compiles engines for other series.
"""
