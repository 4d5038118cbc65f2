"""Handwritten characters by writer, from LEAF and other sources."""
