"""GPU kernels with their torch references. Needs torch (and Triton on a GPU); imports no SGLang."""
