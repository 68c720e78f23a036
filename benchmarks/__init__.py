"""What this library costs, beside programs written by hand and other ways to freeze."""
