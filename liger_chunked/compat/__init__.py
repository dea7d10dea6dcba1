"""The names and signatures of Liger-Kernel 0.8.5, so that its users change only their imports.

    from liger_kernel.chunked_loss import LigerFusedLinearDPOLoss           # before
    from liger_chunked.compat.chunked_loss import LigerFusedLinearDPOLoss   # after

    from liger_kernel.transformers import apply_liger_kernel_to_llama
    from liger_chunked.compat.transformers import apply_liger_kernel_to_llama

Constructors, argument order, defaults and return values are Liger-Kernel's; the computation is this library's.
Arguments that only tune Liger-Kernel's kernels have no effect. An unsupported argument that would change the result
raises NotImplementedError. Each module lists where the numbers differ.

New code should use the names of `liger_chunked`: one order of arguments, metrics by name, more options.
"""
