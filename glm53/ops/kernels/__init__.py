"""Triton kernels, one file per operator; imported when a CUDA tensor first reaches one."""
