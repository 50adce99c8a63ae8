"""Loads and saves published weights."""
