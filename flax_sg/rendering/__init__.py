"""How reports are shown: as text, HTML and pictures. They are collected elsewhere."""
