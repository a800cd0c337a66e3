"""Sizes of some public models, from their `config.json`: enough to say what their passes and caches cost.

All are decoders with gated feed-forward layers and RMS norms (the Llama family and Qwen2), so that parameters follow
from the sizes; the numbers that their makers publish are the tests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from experiments import theory
from experiments.roofline import ModelCost


@dataclass(frozen=True)
class KnownModel:
    """`is_tied`: the head is the embedding table. `context_tokens` are the positions that its configuration allows."""

    name: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_tokens: int
    is_tied: bool = False
    has_qkv_bias: bool = False

    @property
    def body_parameters(self) -> int:
        """Weights of the layers' products: query and output, key and value, and three of the feed-forward layer."""
        attention = 2 * (self.num_query_heads + self.num_kv_heads) * self.head_dim
        return self.num_layers * self.hidden_size * (attention + 3 * self.intermediate_size)

    @property
    def table_parameters(self) -> int:
        """Of the embedding table, and of the head as well."""
        return self.vocab_size * self.hidden_size

    @property
    def num_parameters(self) -> int:
        """All of them: biases and norms too, a tied head once."""
        biases = (self.num_query_heads + 2 * self.num_kv_heads) * self.head_dim if self.has_qkv_bias else 0
        small = self.num_layers * (2 * self.hidden_size + biases) + self.hidden_size
        return self.body_parameters + small + self.table_parameters * (1 if self.is_tied else 2)

    def weights_bytes(self, bytes_per_weight: float = 2.0) -> float:
        return self.num_parameters * bytes_per_weight

    def kv_bytes_per_token(self, bytes_per_value: float = 2.0) -> float:
        return theory.kv_bytes_per_token(self.num_layers, self.num_kv_heads, self.head_dim, bytes_per_value)

    def cost(self, bytes_per_weight: float = 2.0, bytes_per_value: float = 2.0) -> ModelCost:
        """All weights in one format, scales left out."""
        row_parameters = 0 if self.is_tied else self.hidden_size
        unread = 0 if self.is_tied else self.table_parameters - row_parameters
        return ModelCost(
            weights_read_bytes=round((self.num_parameters - unread) * bytes_per_weight),
            embedding_row_bytes=round(row_parameters * bytes_per_weight),
            kv_bytes_per_token=self.kv_bytes_per_token(bytes_per_value),
            body_parameters=self.body_parameters,
            head_parameters=self.table_parameters,
            attention_width=self.num_layers * self.num_query_heads * self.head_dim,
        )


LLAMA_3_1_8B = KnownModel("Llama 3.1 8B", 32, 4096, 14336, 32, 8, 128, 128_256, 131_072)
LLAMA_3_2_1B = KnownModel("Llama 3.2 1B", 16, 2048, 8192, 32, 8, 64, 128_256, 131_072, is_tied=True)
LLAMA_2_7B = KnownModel("Llama 2 7B", 32, 4096, 11008, 32, 32, 128, 32_000, 4096)
MISTRAL_7B = KnownModel("Mistral 7B v0.3", 32, 4096, 14336, 32, 8, 128, 32_768, 32_768)
QWEN_2_5_7B = KnownModel(
    "Qwen2.5 7B Instruct", 28, 3584, 18944, 28, 4, 128, 152_064, 32_768, has_qkv_bias=True
)
QWEN_2_5_0_5B = KnownModel(
    "Qwen2.5 0.5B", 24, 896, 4864, 14, 2, 64, 151_936, 32_768, is_tied=True, has_qkv_bias=True
)
SMOLLM2_135M = KnownModel("SmolLM2 135M", 30, 576, 1536, 9, 3, 64, 49_152, 8192, is_tied=True)

KNOWN_MODELS: Mapping[str, KnownModel] = {
    model.name: model
    for model in (
        SMOLLM2_135M,
        QWEN_2_5_0_5B,
        LLAMA_3_2_1B,
        LLAMA_2_7B,
        MISTRAL_7B,
        QWEN_2_5_7B,
        LLAMA_3_1_8B,
    )
}
