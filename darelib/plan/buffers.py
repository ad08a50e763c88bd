"""Tensors that are no weights: running statistics, schedules, masks, positions. Training does not
learn them, so they are never thinned or scaled.
"""

import re
from typing import Final

# What happens to them: averaged over the models, or copied from the base.
AVERAGED, COPIED = "averaged", "copied"
# Measured by normalisation layers. (Their number of batches is copied.)
MEASURED: Final = re.compile(r"(^|\.)running_(mean|var)$")
CONSTANT: Final = re.compile(
    r"(^|\.)(num_batches_tracked|(position|token_type)_ids|relative_position_index"
    r"|(original_)?inv_freq|(cos|sin)_cached|freqs_cis|masked_bias|(causal|attn|attention)_mask"
    # Diffusion models' noise, by step.
    r"|betas|\w*alphas_cumprod(_prev)?|posterior_(variance|log_variance_clipped|mean_coef[12])"
    r"|lvlb_weights|denoiser\.sigmas)$"
)
# GPT-2's causal mask, unless its shape is that of a real bias.
MASK: Final = re.compile(r"att(entio)?n\.bias$")


def find_buffer(name: str, shape: tuple[int, ...]) -> str:
    """What happens to a tensor that is no weight; "": it is one."""
    if MEASURED.search(name):
        return AVERAGED
    is_mask = len(shape) == 4 and shape[:2] == (1, 1) and shape[2] == shape[3]
    return COPIED if CONSTANT.search(name) or (is_mask and MASK.search(name)) else ""
