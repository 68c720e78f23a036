"""Programs as data, and two interpreters: with real blocks, and by hand."""
