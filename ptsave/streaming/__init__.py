"""Writes files whose payloads come from other files, without passing through tensors."""
