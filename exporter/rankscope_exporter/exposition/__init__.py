"""Exposition: metric declarations, their cached sample lines, and the rendered page."""
