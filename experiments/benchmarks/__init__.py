"""Timings that back a claim: scripts, not tests."""
