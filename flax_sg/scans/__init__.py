"""Frozen layers of a scan, and stops in the body of a scan."""
