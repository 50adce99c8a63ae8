"""Tuning, progress, threads, memory limits, and adapters to torch's private names."""
