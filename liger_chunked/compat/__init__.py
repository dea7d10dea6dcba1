"""Liger-Kernel 0.8.5's names and signatures: users change only their imports.

    import liger_kernel.chunked_loss, liger_kernel.transformers                     # before
    import liger_chunked.compat.chunked_loss, liger_chunked.compat.transformers     # after

Constructors, argument order, defaults and return values are Liger-Kernel's; the computation is this library's.
Arguments that only tune kernels have no effect. Unsupported ones that would change the result raise
NotImplementedError. Each module lists where the numbers differ.

New code should use `liger_chunked`: one argument order, metrics by name, more options.
"""
