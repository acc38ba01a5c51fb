"""`Compressed`: any strategy of Flower, over a grid that compresses its messages."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, replace
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyClientSideFixedClipping,
    FedAvg,
    FedXgbBagging,
    QFedAvg,
    Result,
    Strategy,
)

from gradwire.catalogue.spec_by_name import Spec
from gradwire.errors import GradwireError, SpecError
from gradwire.flower.server.download_chain import DownloadChain
from gradwire.flower.server.round_limits import RoundLimits
from gradwire.flower.server.wire_grid import Wire
from gradwire.flower.shared.adaptive_rate import Rate
from gradwire.flower.shared.adaptive_rate import parse as parse_rate
from gradwire.flower.shared.message import NO_SECURE_AGGREGATION

CLIPPED_BY_CLIENTS = (DifferentialPrivacyClientSideAdaptiveClipping, DifferentialPrivacyClientSideFixedClipping)


class Compressed(Strategy):
    """A strategy whose clients use the mod `gradwire.flower.compress`.

        strategy = gradwire.flower.Compressed(FedAvg(fraction_train=0.5))

    `download` is a recipe for what goes to clients ("stc"; None for whole models), and `rate` is an adaptive rate of
    their updates (`AdaQuantFL()`, `FedDQ()`).

    `max_norm` and `max_weight` limit what one client can do to the mean of a round: replies whose update is longer (by
    its Euclidean norm), or whose weight is larger, are rejected. Each is a number, or "10x" for ten times the median of
    the round, or None for no limit. "auto" rejects only what no honest client sends, and is no protection against a
    client that wants to do harm: docs/flower.md says what is.

    `start` runs the `start` of the wrapped strategy over a `Wire`, so that the strategy sees models and replies as it
    would without gradwire; all other methods and attributes are those of the wrapped strategy. Every `start` is a new
    training. It never averages or weights anything itself, and has to be the outermost strategy. Flower calls it in the
    thread of the server app; `stats` may be called from any thread.
    """

    def __init__(
        self, strategy: Strategy, *, download: Spec | None = None, rate: Rate | str | None = None,
        max_norm: float | str | None = "auto", max_weight: float | str | None = "auto",
    ):  # fmt: skip
        if "secure_aggregation" in type(strategy).__module__:
            raise SpecError(NO_SECURE_AGGREGATION)
        if not isinstance(strategy, Strategy):
            raise SpecError(
                f"Compressed takes a strategy of flwr.serverapp.strategy, such as FedAvg(), not {strategy!r}: those of "
                f"flwr.server.strategy, and clients made by client_fn, send messages that gradwire does not know"
            )
        if isinstance(strategy, Compressed):
            raise SpecError("this strategy is Compressed already: once is enough")
        if isinstance(strategy, CLIPPED_BY_CLIENTS):
            raise SpecError(
                f"{type(strategy).__name__} adds noise for updates that clients have clipped, but with their error "
                f"memory what arrives may be longer: use a DifferentialPrivacyServerSide… strategy, which clips that"
            )
        if rate is not None and not isinstance(rate, str | Rate):
            raise SpecError(f"a rate is AdaQuantFL(…), FedDQ(…) or text such as 'feddq', not {rate!r}")
        if download is not None:
            DownloadChain(download)  # raises a SpecError now rather than when the training starts
        RoundLimits(max_norm, max_weight)  # likewise
        self.strategy, self.download = strategy, download
        self.max_norm, self.max_weight = max_norm, max_weight
        self.rate = parse_rate(rate) if isinstance(rate, str) else rate
        self.wire: Wire | None = None

    def start(self, grid: Grid, *args: Any, **options: Any) -> Result:
        """Run a new training by the `start` of the wrapped strategy, which gets all other arguments."""
        inner = _innermost(self.strategy)
        rate = replace(self.rate) if self.rate else None  # each training begins with a first loss of its own
        self.wire = Wire(
            grid,
            download=self.download,
            rate=rate,
            weighted_by=getattr(inner, "weighted_by_key", "num-examples"),
            require_same_layout=isinstance(inner, FedAvg),  # as all strategies of Flower are
            needed_metrics=(inner.train_loss_key,) if isinstance(inner, QFedAvg) else (),
            max_norm=self.max_norm,
            max_weight=self.max_weight,
            adds_trees=isinstance(inner, FedXgbBagging),
        )
        return self.strategy.start(self.wire, *args, **options)

    def stats(self) -> dict[str, dict[str, int]]:
        """Return the messages and bytes of the training so far, by category of message: train, evaluate, query."""
        return {name: asdict(traffic) for name, traffic in self.wire.meter.by_category.items()} if self.wire else {}

    # ── Flower's interface, passed on to the wrapped strategy ──

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return the wrapped strategy's messages for a round of training."""
        if not isinstance(grid, Wire):  # another strategy wraps this one, so that nothing would be compressed
            raise GradwireError(
                "gradwire.flower.Compressed has to be the outermost strategy: Compressed(Other(FedAvg())), not "
                "Other(Compressed(FedAvg()))"
            )
        return self.strategy.configure_train(server_round, arrays, config, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Return the wrapped strategy's next model and metrics."""
        return self.strategy.aggregate_train(server_round, replies)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return the wrapped strategy's messages for an evaluation on clients."""
        return self.strategy.configure_evaluate(server_round, arrays, config, grid)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Return the wrapped strategy's metrics of an evaluation."""
        return self.strategy.aggregate_evaluate(server_round, replies)

    def summary(self) -> None:
        """Log the configuration of the wrapped strategy."""
        self.strategy.summary()

    def __getattr__(self, name: str) -> Any:
        if "strategy" not in self.__dict__:  # as while it is being copied
            raise AttributeError(name)
        return getattr(self.strategy, name)


def _innermost(strategy: Strategy) -> Strategy:
    """Return the strategy that averages, inside of those that wrap one, as Flower's differential privacy does."""
    while isinstance(inner := getattr(strategy, "strategy", None), Strategy):
        strategy = inner
    return strategy
