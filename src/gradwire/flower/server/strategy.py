"""`Compressed`: any strategy of Flower, with messages compressed on their way."""

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
    Result,
    Strategy,
)

from gradwire.catalogue.spec_by_name import Spec
from gradwire.errors import GradwireError, SpecError
from gradwire.flower.server.download_chain import Chain
from gradwire.flower.server.wire_grid import Wire
from gradwire.flower.shared.adaptive_rate import Rate
from gradwire.flower.shared.adaptive_rate import parse as parse_rate

CLIPPED_BY_CLIENTS = (DifferentialPrivacyClientSideAdaptiveClipping, DifferentialPrivacyClientSideFixedClipping)


class Compressed(Strategy):
    """A strategy whose clients use `gradwire.flower.compress`.

        strategy = gradwire.flower.Compressed(FedAvg(fraction_train=0.5))

    `download` is a recipe for what goes to clients ("stc"; None for whole models), `rate` an adaptive rate of their
    updates (`AdaQuantFL()`, `FedDQ()`). `start` runs the strategy's own `start` over a grid that decodes; all else is
    the strategy's own.
    """

    def __init__(self, strategy: Strategy, *, download: Spec | None = None, rate: Rate | str | None = None):
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
            Chain(download)  # a SpecError now rather than when the training starts
        self.strategy, self.download = strategy, download
        self.rate = parse_rate(rate) if isinstance(rate, str) else rate
        self.wire: Wire | None = None

    def start(self, grid: Grid, *args: Any, **options: Any) -> Result:
        weighted_by = getattr(self.strategy, "weighted_by_key", "num-examples")
        rate = replace(self.rate) if self.rate else None  # each training has its own first loss
        alike = isinstance(self.strategy, FedAvg)  # as all of Flower's own are
        self.wire = Wire(grid, download=self.download, rate=rate, weighted_by=weighted_by, alike=alike)
        return self.strategy.start(self.wire, *args, **options)

    def stats(self) -> dict[str, dict[str, int]]:
        """Messages and bytes of the run so far, by category of message: train, evaluate, query."""
        return {name: asdict(traffic) for name, traffic in self.wire.meter.by_category.items()} if self.wire else {}

    # ── the strategy's own ──

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        if not isinstance(grid, Wire):  # the start of a strategy around this one: nothing would be compressed
            raise GradwireError(
                "gradwire.flower.Compressed has to be the outermost strategy: Compressed(Other(FedAvg())), not "
                "Other(Compressed(FedAvg()))"
            )
        return self.strategy.configure_train(server_round, arrays, config, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        return self.strategy.aggregate_train(server_round, replies)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        return self.strategy.configure_evaluate(server_round, arrays, config, grid)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        return self.strategy.aggregate_evaluate(server_round, replies)

    def summary(self) -> None:
        self.strategy.summary()

    def __getattr__(self, name: str) -> Any:
        if "strategy" not in self.__dict__:  # while it is copied
            raise AttributeError(name)
        return getattr(self.strategy, name)
