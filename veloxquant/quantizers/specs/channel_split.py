"""Two formats side by side: one for a head's loudest channels, one for the others."""

from dataclasses import dataclass

from veloxquant.quantizers.sizes import WORD_BYTES, CodecSpec


@dataclass(frozen=True)
class ChannelSplitSpec(CodecSpec):
    """The `n_loud` channels of largest mean magnitude in `loud`, the rest in `quiet`.

    Which channels those are is found once, in the first `first` tokens of each head, and kept as a
    permutation. Source: TurboQuant (arXiv 2504.19874), section 4; QJL (arXiv 2406.03482).
    """

    quiet: CodecSpec
    loud: CodecSpec
    n_loud: int
    first: int
    name = "channel_split"
    codec = "veloxquant.quantizers.channel_split:ChannelSplitCodec"

    @property
    def fit_tokens(self) -> int:
        """Tokens in which the loud channels are found."""
        return self.first

    def nbytes(self, tokens: int, dim: int, itemsize: int) -> int:
        """Bytes of a store with capacity for `tokens`."""
        order = dim * WORD_BYTES if tokens else 0
        quiet = self.quiet.nbytes(tokens, dim - self.n_loud, itemsize)
        return order + quiet + self.loud.nbytes(tokens, self.n_loud, itemsize)

    def describe(self) -> str:
        """Short name for tables."""
        return f"{self.quiet.describe()} + {self.n_loud} ch. {self.loud.describe()}"
