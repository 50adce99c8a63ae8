"""Replaces itself in ``sys.modules`` with the engine, the extension for the installed torch."""

import sys

import torch

from ptsave.engines.choice import load

sys.modules[__name__] = load(torch.__version__)
