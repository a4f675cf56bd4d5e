"""Exact selection and one-pass log-prob ops; each has a torch reference and, where it was built, a compiled path.

`backend("reference")` and `backend("extension")` choose one for the calls inside; without it the compiled path runs
wherever it can. `python -m d3s_megatron.ops` prints what there is.
"""

from d3s_megatron.ops.extension import backend
from d3s_megatron.ops.group_advantages import group_advantages
from d3s_megatron.ops.hashing import mix64
from d3s_megatron.ops.linear_logprob import linear_logprob
from d3s_megatron.ops.logprob_entropy import logprob_entropy
from d3s_megatron.ops.max_variance import max_variance_subset
from d3s_megatron.ops.packing import balanced_partition, first_fit
from d3s_megatron.ops.top_share import ShareCut, num_top, top_share, top_share_cut

__all__ = [
    "ShareCut",
    "backend",
    "balanced_partition",
    "first_fit",
    "group_advantages",
    "linear_logprob",
    "logprob_entropy",
    "max_variance_subset",
    "mix64",
    "num_top",
    "top_share",
    "top_share_cut",
]
