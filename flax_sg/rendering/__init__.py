"""Renders tables of plain data as text and pictures."""
