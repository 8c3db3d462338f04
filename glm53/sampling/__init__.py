"""SamplingParams, logits processors, sampler."""

from glm53.sampling.constraints import Constraint, ConstraintCompiler, constraint_of
from glm53.sampling.params import GREEDY_BELOW, LIBRARY_DEFAULTS, SamplingParams
from glm53.sampling.processors import Row, SamplerState, SamplingError, process_logits
from glm53.sampling.sampler import (
    Sample,
    exponential_noise,
    sample,
    token_logprobs,
    unusable_rows,
)

__all__ = [
    "GREEDY_BELOW",
    "LIBRARY_DEFAULTS",
    "Constraint",
    "ConstraintCompiler",
    "Row",
    "Sample",
    "SamplerState",
    "SamplingError",
    "SamplingParams",
    "constraint_of",
    "exponential_noise",
    "process_logits",
    "sample",
    "token_logprobs",
    "unusable_rows",
]
