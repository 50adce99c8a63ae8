"""Tests of what needs an accelerator: real hardware, or one made for tests."""
