"""Engines: the extension module ``_C``, compiled for each minor series of torch.

A wheel has one for every series that existed when the wheel was made, in folders beside this file.
`ptsave.build_engine` compiles others.
"""
