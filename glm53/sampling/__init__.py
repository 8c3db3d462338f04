"""SamplingParams, logits processors, sampler."""

from glm53.sampling.params import GREEDY_BELOW, LIBRARY_DEFAULTS, SamplingParams
from glm53.sampling.processors import Row, SamplerState, process_logits
from glm53.sampling.sampler import (
    Sample,
    SamplingError,
    exponential_noise,
    sample,
    token_logprobs,
    unusable_rows,
)

__all__ = [
    "GREEDY_BELOW",
    "LIBRARY_DEFAULTS",
    "Row",
    "Sample",
    "SamplerState",
    "SamplingError",
    "SamplingParams",
    "exponential_noise",
    "process_logits",
    "sample",
    "token_logprobs",
    "unusable_rows",
]
