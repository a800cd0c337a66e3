"""Figures of measured runs. Each function is pure: data in, a matplotlib `Figure` out, or None for nothing to draw.

They know nothing of files, tracking or configuration, and leave pyplot and matplotlib's global settings alone.
"""
