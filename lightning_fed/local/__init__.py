"""Solve the local problem of one client: its visit, and the ways to take a local step."""
