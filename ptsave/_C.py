"""Gives way to the engine for the torch that is installed, which is imported by this name."""

import sys

import torch

from ptsave.engines.choice import load

sys.modules[__name__] = load(torch.__version__)
