"""Where questions come from: file to problems, problems to prompts, prompts in a seeded and resumable order."""

from d3s_megatron.data.config import DataConfig
from d3s_megatron.data.order import PromptOrder
from d3s_megatron.data.problems import Problem, load_problems
from d3s_megatron.data.prompts import encode_prompts
from d3s_megatron.data.sets import load_set

__all__ = ["DataConfig", "Problem", "PromptOrder", "encode_prompts", "load_problems", "load_set"]
