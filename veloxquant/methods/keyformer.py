"""keyformer: collected attention of a softmax that is perturbed and flattened.

The score of a row is the sum, over all queries, of softmax((logits + Gumbel noise) / temperature):
noise regularises the choice, and a temperature that rises while tokens are generated makes up for
the mass of the rows that are gone. Attention itself stays as it is. `keyformer_tau` fixes the
temperature; else it goes from `keyformer_tau_init` to `keyformer_tau_end` in
`keyformer_anneal_steps` single tokens.
Source: Adnan et al., Keyformer, 2024, arXiv 2403.09054, sections 3.2 to 3.4. Differs: sinks; the
newest row is no candidate even with `keyformer_recent=0`; noise is alike for all sequences of a
batch, drawn from `keyformer_seed`, the layer, and how many queries were scored before.
Without true queries the score is KeyDiff's (arXiv 2504.15364) and the cache says `proxy`.
"""

from typing import Any

import mlx.core as mx

from veloxquant.cache.context import LayerContext
from veloxquant.cache.evicting import EvictingCache, Policy
from veloxquant.cache.scorers import CumulativeAttention, Rows
from veloxquant.config.kv_cache import KVCacheConfig
from veloxquant.quantizers.sizes import LayerShape

QUERIES_PER_LAYER = 1 << 40


def gumbel(shape: tuple[int, ...], key: mx.array) -> mx.array:
    """Gumbel(0, 1) noise in fp32, always finite."""
    u = mx.random.uniform(low=1e-20, high=1 - 1e-7, shape=shape, key=key)
    return -mx.log(-mx.log(mx.clip(u, 1e-20, 1 - 1e-7)))


def temperature(step: int, first: float, last: float, steps: int) -> float:
    """From `first` to `last` in `steps` steps; `first` for ever without any."""
    return first + min(step / steps, 1.0) * (last - first) if steps else first


class GumbelAttention(CumulativeAttention):
    """Collected attention with noise and temperature."""

    def __init__(self, config: KVCacheConfig, layer: int) -> None:
        super().__init__()
        self.tau = config.keyformer_tau
        self.tau_range = (config.keyformer_tau_init, config.keyformer_tau_end)
        self.anneal_steps = config.keyformer_anneal_steps
        self.stream = (config.keyformer_seed + 1) * QUERIES_PER_LAYER + layer * (1 << 28)
        self.noise = True
        self.steps = 0

    def temperature(self) -> float:
        """Now, by the single tokens seen."""
        if self.tau is not None:
            return self.tau
        return temperature(self.steps, *self.tau_range, self.anneal_steps)

    def observe(
        self, rows: Rows, queries: mx.array, scale: float, sinks: mx.array | None = None
    ) -> None:
        """As the base; a single token is a step."""
        super().observe(rows, queries, scale, sinks)
        self.steps += queries.shape[2] == 1

    def weigh(self, logits: mx.array, sinks: mx.array | None) -> mx.array:
        """Softmax of the noisy logits; what a query may not see gets exactly nothing."""
        if self.noise:
            key = mx.random.key((self.stream + self.queries_seen) % (1 << 63))
            logits = logits + gumbel((1, *logits.shape[1:]), key)
        tau = self.temperature()
        return super().weigh(logits / tau, None if sinks is None else sinks / tau)

    def rewind(self, n: int) -> None:
        """Steps taken back count no more."""
        super().rewind(n)
        self.steps = max(0, self.steps - n)

    def saved(self) -> list[Any]:
        """With the steps and the place in the random stream."""
        return [*super().saved(), self.steps, self.stream]

    def restore(self, saved: list[Any]) -> None:
        """Take back what `saved` gave."""
        super().restore(saved[:4])
        self.steps, self.stream = int(saved[4]), int(saved[5])


class KeyformerKVCache(EvictingCache):
    """Rows with the noisy attention they collected."""

    def __init__(self, config: KVCacheConfig, shape: LayerShape, layer: int = 0) -> None:
        policy = Policy(
            config.keyformer_budget,
            config.keyformer_n_sink,
            max(1, config.keyformer_recent),
            later_wins=True,
        )
        super().__init__(shape, config.method, policy, GumbelAttention(config, layer))

    @property
    def keyformer_kept_bytes(self) -> int:
        """Bytes of the rows held."""
        return self.kept_bytes


def build(config: KVCacheConfig, shape: LayerShape, context: LayerContext) -> KeyformerKVCache:
    """The cache of one layer."""
    return KeyformerKVCache(config, shape, context.layer)
