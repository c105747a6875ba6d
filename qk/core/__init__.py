"""What surrounds a kernel: numerics, activations, checks, operators and launches, one topic per file."""
