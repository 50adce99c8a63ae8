"""Engines: the extension module ``_C``, compiled for each minor series of torch.

A wheel brings one for every series that there was when it was made, each in a folder beside this
file.  `ptsave.build_engine` compiles others.
"""
