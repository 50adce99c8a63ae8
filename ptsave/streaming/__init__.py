"""Payloads go from file to file, without passing through tensors."""
