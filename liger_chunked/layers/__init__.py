"""Layers of a model: one per file, from the Triton kernel and its torch path to the function and the module.

norms               rms_norm.py, layer_norm.py; norm_rows.py: their tiles of rows
gated units         glu.py: units, and the MLPs around them; relu_squared.py
rotary embedding    rope.py
experts             experts.py: rows of tokens, around grouped products
any MLP             tiled.py: tile by tile over the tokens

`kernels/` has what these share with the head: backends, launches, checks of operands, tuned constants.
"""

from liger_chunked.layers.glu import LigerGEGLUMLP, LigerSwiGLUMLP, liger_geglu, liger_swiglu
from liger_chunked.layers.layer_norm import LigerLayerNorm, liger_layer_norm
from liger_chunked.layers.relu_squared import liger_relu_squared
from liger_chunked.layers.rms_norm import LigerRMSNorm, liger_rms_norm, liger_rms_norm_gated
from liger_chunked.layers.rope import liger_rotary_pos_emb

__all__ = [
    "LigerGEGLUMLP",
    "LigerLayerNorm",
    "LigerRMSNorm",
    "LigerSwiGLUMLP",
    "liger_geglu",
    "liger_layer_norm",
    "liger_relu_squared",
    "liger_rms_norm",
    "liger_rms_norm_gated",
    "liger_rotary_pos_emb",
    "liger_swiglu",
]
