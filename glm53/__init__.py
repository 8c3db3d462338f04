"""GLM-5.x inference in plain PyTorch."""

from glm53.api import GLM53
from glm53.batch import Trace
from glm53.chat import ChatCompletion, ChatDelta
from glm53.config import GLM53Config
from glm53.engine import Engine
from glm53.parsing import ToolCall
from glm53.request import Completion, Delta, Metrics
from glm53.sampling import SamplingParams

__all__ = [
    "GLM53",
    "ChatCompletion",
    "ChatDelta",
    "Completion",
    "Delta",
    "Engine",
    "GLM53Config",
    "Metrics",
    "SamplingParams",
    "ToolCall",
    "Trace",
]
