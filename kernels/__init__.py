"""GPU kernels with their torch references.

One operation per file: the formula, the torch reference (the serving path on the CPU and the
oracle of the kernel's test), the Triton kernel, and one launcher that picks by device. Nothing
here imports SGLang; on a GPU the package needs torch and Triton alone.
"""
