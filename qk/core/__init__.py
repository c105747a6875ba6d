"""What surrounds a kernel: numerics, activations, checks, operators and launches, one subject a file."""
