"""Independent oracle: the whole network, one sequence at a time, written in loops.

Everything that the library does differently is done the plain way here: keys and values are
expanded per head from kv_b_proj, scores cover the whole sequence and a selection mask removes what
the indexer did not choose, rotations are complex products of single pairs, experts run one token
at a time, and nothing is cached. Follows the formulas of transformers' GlmMoeDsaForCausalLM, plus
both rotary pairings and the multi-token-prediction layer, which transformers lacks.

Names: D hidden, H heads, S sequence, G index head dim (see the package's shape suffixes).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from glm53.config import GLM53Config


@dataclass
class Outcome:
    """What one pass over a sequence gave.

    hidden [S, D] after the final norm; logits [S, W]; by layer: index scores [S, S] (-inf where not
    visible), selected positions of every row, expert ids of every row (ascending).
    """

    hidden: Tensor
    logits: Tensor
    scores: dict[int, Tensor] = field(default_factory=dict)
    selections: dict[int, list[list[int]]] = field(default_factory=dict)
    experts: dict[int, list[list[int]]] = field(default_factory=dict)

    def cut_gaps(self, layer: int, index_topk: int) -> list[float]:
        """Score distance between the last kept and the first dropped key of each row, relative to
        the row's largest score; inf for rows that keep every key."""
        gaps = []
        for t, row_S in enumerate(self.scores[layer]):
            ranked = row_S[: t + 1].sort(descending=True).values
            if ranked.numel() <= index_topk:
                gaps.append(math.inf)
            else:
                scale = max(ranked.abs().max().item(), 1e-30)
                gaps.append((ranked[index_topk - 1] - ranked[index_topk]).item() / scale)
        return gaps


def rotate(x: Tensor, position: int, theta: float, interleave: bool) -> Tensor:
    """Rotary embedding of one vector [R] as a product of complex numbers, pair by pair."""
    half = x.numel() // 2
    out = x.clone()
    for j in range(half):
        first, second = (2 * j, 2 * j + 1) if interleave else (j, j + half)
        angle = position * theta ** (-2 * j / x.numel())
        turned = complex(x[first], x[second]) * complex(math.cos(angle), math.sin(angle))
        out[first], out[second] = turned.real, turned.imag
    return out


class Reference:
    """The network of `config` with the tensors of `state_dict`, computed in `dtype`."""

    def __init__(
        self,
        config: GLM53Config,
        state_dict: Mapping[str, Tensor],
        dtype: torch.dtype = torch.float64,
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.weights = {name: t.detach().to(dtype) for name, t in state_dict.items()}

    def __call__(
        self, ids: list[int], selections: Mapping[int, list[list[int]]] | None = None
    ) -> Outcome:
        """Logits of `ids`; `selections` replaces the choice of the layers that it names."""
        config = self.config
        outcome = Outcome(hidden=torch.empty(0), logits=torch.empty(0))
        stream_SD = self.weights["model.embed_tokens.weight"][ids]
        chosen: list[list[int]] = []
        for layer in range(config.num_hidden_layers):
            given = None if selections is None else selections.get(layer)
            stream_SD, chosen = self._layer(stream_SD, layer, chosen, outcome, given)
        outcome.hidden = self._rms_norm(stream_SD, "model.norm", config.rms_norm_eps)
        outcome.logits = outcome.hidden @ self.weights["lm_head.weight"].T
        return outcome

    def draft(
        self, next_ids: list[int], hidden_SD: Tensor, selection: list[list[int]] | None = None
    ) -> Outcome:
        """One step of the MTP layer over the whole sequence: row t holds the hidden state of
        position t and the embedding of the token that follows it. `selection` replaces its own."""
        config = self.config
        layer, eps = config.num_hidden_layers, config.rms_norm_eps
        prefix = f"model.layers.{layer}"
        embeddings_SD = self.weights["model.embed_tokens.weight"][next_ids].clone()
        embeddings_SD[0] = 0
        both = torch.cat(
            [
                self._rms_norm(embeddings_SD, f"{prefix}.enorm", eps),
                self._rms_norm(hidden_SD.to(self.dtype), f"{prefix}.hnorm", eps),
            ],
            dim=-1,
        )
        outcome = Outcome(hidden=torch.empty(0), logits=torch.empty(0))
        stream_SD = both @ self.weights[f"{prefix}.eh_proj.weight"].T
        stream_SD, _ = self._layer(stream_SD, layer, [], outcome, selection)
        outcome.hidden = self._rms_norm(stream_SD, f"{prefix}.shared_head.norm", eps)
        outcome.logits = outcome.hidden @ self.weights["lm_head.weight"].T
        return outcome

    def _rms_norm(self, x: Tensor, name: str, eps: float) -> Tensor:
        rows = [row / math.sqrt(row.pow(2).mean().item() + eps) for row in x]
        return torch.stack(rows) * self.weights[f"{name}.weight"]

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self.weights[f"{name}.weight"].T

    def _layer(
        self,
        stream_SD: Tensor,
        layer: int,
        chosen: list[list[int]],
        outcome: Outcome,
        given: list[list[int]] | None,
    ) -> tuple[Tensor, list[list[int]]]:
        config, prefix = self.config, f"model.layers.{layer}"
        x_SD = self._rms_norm(stream_SD, f"{prefix}.input_layernorm", config.rms_norm_eps)
        q_SQ = self._rms_norm(
            self._linear(x_SD, f"{prefix}.self_attn.q_a_proj"),
            f"{prefix}.self_attn.q_a_layernorm",
            config.latent_norm_eps,
        )
        if config.is_full(layer):
            chosen = self._index(x_SD, q_SQ, layer, outcome)
            outcome.selections[layer] = chosen = chosen if given is None else given
        stream_SD = stream_SD + self._attention(x_SD, q_SQ, layer, chosen)
        x_SD = self._rms_norm(stream_SD, f"{prefix}.post_attention_layernorm", config.rms_norm_eps)
        if config.is_sparse(layer):
            stream_SD = stream_SD + self._moe(x_SD, layer, outcome)
        else:
            stream_SD = stream_SD + self._mlp(x_SD, f"{prefix}.mlp")
        return stream_SD, chosen

    def _rotate_rows(self, x_SR: Tensor, interleave: bool) -> Tensor:
        theta = self.config.rope_theta
        return torch.stack([rotate(x_R, s, theta, interleave) for s, x_R in enumerate(x_SR)])

    def _index(self, x_SD: Tensor, q_SQ: Tensor, layer: int, outcome: Outcome) -> list[list[int]]:
        config, prefix = self.config, f"model.layers.{layer}.self_attn.indexer"
        length, rotary = x_SD.shape[0], config.qk_rope_head_dim
        heads, dim = config.index_n_heads, config.index_head_dim

        keys_SG = self._linear(x_SD, f"{prefix}.wk")
        centred = keys_SG - keys_SG.mean(-1, keepdim=True)
        keys_SG = centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
        keys_SG = keys_SG * self.weights[f"{prefix}.k_norm.weight"]
        keys_SG = keys_SG + self.weights[f"{prefix}.k_norm.bias"]
        flag = config.indexer_rope_interleave
        keys_SG[:, :rotary] = self._rotate_rows(keys_SG[:, :rotary], flag)

        queries = self._linear(q_SQ, f"{prefix}.wq_b").reshape(length, heads, dim)
        weights = self._linear(x_SD, f"{prefix}.weights_proj")
        scores_SS = torch.zeros(length, length, dtype=self.dtype)
        for head in range(heads):
            q_SG = queries[:, head].clone()
            q_SG[:, :rotary] = self._rotate_rows(q_SG[:, :rotary], flag)
            similarity = (q_SG @ keys_SG.T * dim**-0.5).clamp(min=0)
            scores_SS += heads**-0.5 * weights[:, head, None] * similarity
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        scores_SS[future] = -math.inf
        outcome.scores[layer] = scores_SS

        chosen = []
        for t in range(length):
            ranked = sorted(range(t + 1), key=lambda s, row=scores_SS[t]: (-row[s].item(), s))
            chosen.append(sorted(ranked[: config.index_topk]))
        return chosen

    def _attention(self, x_SD: Tensor, q_SQ: Tensor, layer: int, chosen: list[list[int]]) -> Tensor:
        config, prefix = self.config, f"model.layers.{layer}.self_attn"
        length, heads = x_SD.shape[0], config.num_attention_heads
        nope, rank = config.qk_nope_head_dim, config.kv_lora_rank
        both = self._linear(x_SD, f"{prefix}.kv_a_proj_with_mqa")
        latent = self._rms_norm(both[:, :rank], f"{prefix}.kv_a_layernorm", config.latent_norm_eps)
        k_rope = self._rotate_rows(both[:, rank:], config.rope_interleave)
        queries = self._linear(q_SQ, f"{prefix}.q_b_proj").reshape(length, heads, -1)
        expanded = self._linear(latent, f"{prefix}.kv_b_proj").reshape(length, heads, -1)

        hidden = torch.full((length, length), -math.inf, dtype=self.dtype)
        for t, positions in enumerate(chosen):
            hidden[t, positions] = 0
        outputs = []
        for head in range(heads):
            q_rope = self._rotate_rows(queries[:, head, nope:], config.rope_interleave)
            keys = torch.cat([expanded[:, head, :nope], k_rope], dim=-1)
            query = torch.cat([queries[:, head, :nope], q_rope], dim=-1)
            scores_SS = query @ keys.T / math.sqrt(keys.shape[1]) + hidden
            outputs.append(scores_SS.softmax(-1) @ expanded[:, head, nope:])
        return self._linear(torch.cat(outputs, dim=-1), f"{prefix}.o_proj")

    def _mlp(self, x: Tensor, name: str) -> Tensor:
        gate = self._linear(x, f"{name}.gate_proj")
        return self._linear(
            gate / (1 + (-gate).exp()) * self._linear(x, f"{name}.up_proj"), f"{name}.down_proj"
        )

    def _route(self, x_D: Tensor, prefix: str) -> dict[int, float]:
        """Expert id -> weight of one token."""
        config = self.config
        scores = (1 / (1 + (-self._linear(x_D, f"{prefix}.gate")).exp())).tolist()
        bias = self.weights[f"{prefix}.gate.e_score_correction_bias"].tolist()
        choice = [score + b for score, b in zip(scores, bias, strict=True)]
        size = config.n_routed_experts // config.n_group
        groups = [choice[g * size : (g + 1) * size] for g in range(config.n_group)]
        by_rank = sorted(range(config.n_group), key=lambda g: -sum(sorted(groups[g])[-2:]))
        kept = by_rank[: config.topk_group]
        allowed = [e for e in range(len(choice)) if e // size in kept]
        chosen = sorted(allowed, key=lambda e: (-choice[e], e))[: config.num_experts_per_tok]
        total = sum(scores[e] for e in chosen) + 1e-20 if config.norm_topk_prob else 1.0
        return {e: scores[e] / total * config.routed_scaling_factor for e in chosen}

    def _moe(self, x_SD: Tensor, layer: int, outcome: Outcome) -> Tensor:
        prefix = f"model.layers.{layer}.mlp"
        gate_up = self.weights[f"{prefix}.experts.gate_up_proj"]
        down = self.weights[f"{prefix}.experts.down_proj"]
        rows, outcome.experts[layer] = [], []
        for x_D in x_SD:
            routed = torch.zeros_like(x_D)
            weights = self._route(x_D, prefix)
            for expert, weight in weights.items():
                gate, up = (gate_up[expert] @ x_D).chunk(2)
                routed += weight * (down[expert] @ (gate / (1 + (-gate).exp()) * up))
            outcome.experts[layer].append(sorted(weights))
            rows.append(routed)
        return torch.stack(rows) + self._mlp(x_SD, f"{prefix}.shared_experts")
