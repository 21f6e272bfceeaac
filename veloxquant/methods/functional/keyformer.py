"""keyformer on rows of single heads; keys stand for queries."""

from dataclasses import dataclass

import mlx.core as mx

from veloxquant.cache.evicting import POSITIONS, Policy
from veloxquant.cache.scorers import CumulativeAttention
from veloxquant.methods.functional.rows import (
    HeadState,
    absorb,
    check_budget,
    extended,
    full_bytes,
    get_kv,
    held_bytes,
    lift,
)
from veloxquant.methods.keyformer import gumbel as draw
from veloxquant.methods.keyformer import temperature


@dataclass
class KeyformerState(HeadState):
    """Rows of one head with the noisy attention they collected; `pos` counts queries."""

    scores: mx.array | None = None
    gumbel: mx.array | None = None
    positions: mx.array | None = None
    pos: int = 0
    recent: int = 0
    tau_init: float = 1.0
    tau_end: float = 1.0
    anneal_steps: int = 0
    rope_base: float = 10000.0
    next_pos: int = 0
    seed: int = 0

    @property
    def tau(self) -> float:
        """Temperature now."""
        return temperature(self.pos, self.tau_init, self.tau_end, self.anneal_steps)


class SeededAttention(CumulativeAttention):
    """Collected attention with noise by head; the last query's noise is kept."""

    def __init__(self, seeds: list[int], pos: int, tau: float) -> None:
        super().__init__()
        self.seeds, self.pos, self.tau = seeds, pos, tau
        self.drawn: mx.array | None = None

    def weigh(self, logits: mx.array, sinks: mx.array | None) -> mx.array:
        """Softmax of noisy logits (1, N, 1, R, n)."""
        at = self.pos + self.queries_seen
        noise = mx.stack(
            [draw(logits.shape[2:], mx.random.key((seed << 32) + at)) for seed in self.seeds]
        )
        self.drawn = noise[:, 0, -1]
        return super().weigh((logits + noise[None]) / self.tau, sinks)


def init_keyformer_state(
    n_sink: int,
    budget: int,
    head_dim: int,
    recent: int = 0,
    tau: float | None = None,
    tau_init: float = 1.0,
    tau_end: float = 1.0,
    anneal_steps: int = 0,
    rope_base: float = 10000.0,
    seed: int = 0,
) -> KeyformerState:
    """An empty state; `tau` fixes the temperature.

    Raises:
        QuantizerConfigError: unless n_sink < budget.
    """
    check_budget(n_sink, budget)
    first, last = (tau_init, tau_end) if tau is None else (tau, tau)
    return KeyformerState(
        n_sink=n_sink, budget=budget, recent=recent, tau_init=first, tau_end=last,
        anneal_steps=anneal_steps, rope_base=rope_base, seed=seed, head_dim=head_dim,
    )  # fmt: skip


def keyformer_update(
    state: KeyformerState, new_keys: mx.array, new_values: mx.array
) -> KeyformerState:
    """Absorb rows (S, D) and drop the lowest noisy sums outside sinks and recent rows."""
    keys, values, scores, noise, places = lift(
        state.keys, state.values, state.scores, state.gumbel, state.positions
    )
    out = keyformer_update_batched(
        keys, values, scores, noise, places, new_keys[None], new_values[None], state.n_sink,
        state.budget, state.recent, state.tau_init, state.tau_end, state.anneal_steps,
        state.rope_base, state.next_pos, state.pos, [state.seed],
    )  # fmt: skip
    state.keys, state.values, state.scores, state.gumbel, state.positions = (a[0] for a in out[:5])
    state.next_pos, state.pos = out[5], out[6]
    return state


def keyformer_update_batched(
    keys: mx.array | None,
    values: mx.array | None,
    scores: mx.array | None,
    gumbel: mx.array | None,
    positions: mx.array | None,
    new_keys: mx.array,
    new_values: mx.array,
    n_sink: int,
    budget: int,
    recent: int,
    tau_init: float,
    tau_end: float,
    anneal_steps: int,
    rope_base: float,
    next_pos: int,
    pos: int,
    seeds: list[int],
    return_indices: bool = False,
) -> tuple:
    """As `keyformer_update` for (BH, n, D) rows, one seed each; kept indices last if asked.

    Noise is drawn for every query anew, so `gumbel` says only what the newest query drew for each
    row. `rope_base` has no effect: rows keep their rotation.
    """
    del rope_base, gumbel
    held = extended(
        (keys, values), (new_keys, new_values), {"mass": scores, POSITIONS: positions}, next_pos
    )
    tau = temperature(pos, tau_init, tau_end, anneal_steps)
    scorer = SeededAttention(seeds, pos, tau)
    policy = Policy(budget, n_sink, max(1, recent), later_wins=True)
    keep = absorb(held, new_keys, scorer, policy)
    assert scorer.drawn is not None
    held.columns["gumbel"] = scorer.drawn[None]
    index = mx.broadcast_to(mx.arange(held.rows, dtype=mx.int32), held.column("mass").shape)
    if keep is not None:
        held.pick(keep)
        index = keep[0]
    count = new_keys.shape[1]
    columns = (held.column(name) for name in ("mass", "gumbel", POSITIONS))
    out = (*held.pair(), *columns, next_pos + count, pos + count)
    return (*out, index) if return_indices else out


keyformer_get_kv = get_kv
keyformer_fp16_bytes = held_bytes
full_keyformer_fp16_bytes = full_bytes
