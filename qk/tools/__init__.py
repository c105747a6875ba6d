"""The tools behind `python -m qk`: copy kernels, measure them, and compile them for GPUs that you don't have."""
