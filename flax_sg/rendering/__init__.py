"""Renders tables of plain data as text, HTML and pictures."""
