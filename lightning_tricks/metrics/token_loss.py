"""Mean loss over the tokens of a whole validation set, and its exponential, the perplexity."""

from torch import Tensor

from lightning_tricks.metrics._ratio import SumRatio


class TokenLoss(SumRatio):
    """Nats per token: the sum of all tokens' losses over the number of tokens, over all batches and all ranks.

    Not the mean of the batches' means, which weighs a token of a short batch more than one of a long batch. Equal to
    sums in float64 to 1e-13; on Apple's GPUs right to 1e-6, also after a billion tokens. NaN without any token.

    Example:
        >>> loss = TokenLoss()
        >>> loss.update(nats=6.0, tokens=2)
        >>> loss.update(nats=2.0, tokens=2)
        >>> loss.compute().item()
        2.0
    """

    def update(self, nats: Tensor | float, tokens: Tensor | int) -> None:
        """Add a batch.

        Args:
            nats: sum of the losses of its tokens, `cross_entropy(..., reduction="sum")`; a scalar or one a row.
            tokens: number of those tokens; a scalar or one a row.
        """
        self.add_batch(nats, tokens)

    def compute(self) -> Tensor:
        """Nats per token, a scalar."""
        return self.ratio()


class TokenPerplexity(TokenLoss):
    """Exponential of the mean loss over all tokens, batches and ranks: 1 for a model that is always right.

    Example:
        >>> perplexity = TokenPerplexity()
        >>> perplexity.update(nats=0.0, tokens=3)
        >>> perplexity.compute().item()
        1.0
    """

    def compute(self) -> Tensor:
        """Perplexity, a scalar."""
        return self.ratio().exp()
