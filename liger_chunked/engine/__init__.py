"""The engine: it knows heads, tokens, groups and budgets, and no loss by name.

schedule.py   which tokens take part, in which order, in which packs and tiles
passes.py     a pack through the head: statistics, and back
fused.py      gradient in forward: a loss of token statistics, with the gradients it computed on the way
stats.py      the statistics alone, differentiable: `linear_token_stats`
"""

from liger_chunked.engine.fused import fused_loss
from liger_chunked.engine.stats import linear_token_stats, token_stats

__all__ = ["fused_loss", "linear_token_stats", "token_stats"]
