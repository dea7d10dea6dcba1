"""The names and signatures of Liger-Kernel 0.8.5, so that its user changes one import line.

    from liger_kernel.chunked_loss import LigerFusedLinearDPOLoss           # before
    from liger_chunked.compat.chunked_loss import LigerFusedLinearDPOLoss   # after

    from liger_kernel.transformers import apply_liger_kernel_to_llama
    from liger_chunked.compat.transformers import apply_liger_kernel_to_llama

Constructors, the order of arguments in calls, defaults and what is returned are Liger-Kernel's; the computation is this
library's. Arguments that only tune Liger-Kernel's kernels are accepted and have no effect; one that would change the
result, and cannot, raises NotImplementedError with its name. Each module says where the numbers differ.

New code is better served by the names of `liger_chunked` itself: one order of arguments, metrics by name, options that
Liger-Kernel has not.
"""
