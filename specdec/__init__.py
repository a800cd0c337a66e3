"""The decoding engine: prefill, decode and verify over one model and one ragged cache."""

from specdec.draft_length.base import DraftLengthOptions
from specdec.drafters.base import DrafterOptions
from specdec.drafters.prompt_lookup import PromptLookupOptions
from specdec.generation import generate, generate_steps
from specdec.runner import ModelRunner
from specdec.types import Request, SamplingParams, StepOutput

__all__ = [
    "DraftLengthOptions",
    "DrafterOptions",
    "ModelRunner",
    "PromptLookupOptions",
    "Request",
    "SamplingParams",
    "StepOutput",
    "generate",
    "generate_steps",
]
