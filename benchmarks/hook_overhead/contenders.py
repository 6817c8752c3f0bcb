"""Who watches the loop: nobody, Rankscope, prometheus_client as one would write it oneself, and TraceML.

Each is used as its documentation says. Packages are imported when a contender begins, because that is measured.
"""

from __future__ import annotations

from benchmarks.hook_overhead.trainings import Alone


class Nobody:
    """The loop as it is."""

    def begin(self) -> None:
        """Import and instrument."""

    def loop(self, training: Alone, steps: int) -> None:
        """Train for so many steps."""
        for _ in range(steps):
            training.backward(training.forward(training.fetch()))
            training.update()

    def end(self) -> None:
        """What the script does at its end."""

    def collectives(self) -> float:
        """Collectives so far, where the contender knows."""
        return 0.0


class Rankscope(Nobody):
    """Every probe that is on by default."""

    def begin(self) -> None:
        """Import and instrument."""
        import rankscope

        rankscope.instrument()

    def collectives(self) -> float:
        """Collectives so far, from the record."""
        from rankscope import attach
        from rankscope.record import layout

        attachment = attach.current()
        assert attachment is not None
        index = layout.INDEX["collectives"]
        return float(sum(attachment.writer.slots[index : index + len(layout.OPS)]))


class PrometheusClient(Nobody):
    """A histogram of each phase's seconds and a counter of steps, in the training loop."""

    def begin(self) -> None:
        """Import, instrument, and serve what is counted: prometheus_client does so in a thread."""
        from prometheus_client import Counter, Histogram, start_http_server

        seconds = Histogram("training_phase_seconds", "Seconds of a phase.", ["phase"])
        phases = ("data", "forward", "backward", "optimizer")
        self._data, self._forward, self._backward, self._optimizer = (seconds.labels(phase) for phase in phases)
        self._steps = Counter("training_steps", "Steps.")
        start_http_server(0, addr="127.0.0.1")

    def loop(self, training: Alone, steps: int) -> None:
        """Train for so many steps."""
        for _ in range(steps):
            with self._data.time():
                batch = training.fetch()
            with self._forward.time():
                loss = training.forward(batch)
            with self._backward.time():
                training.backward(loss)
            with self._optimizer.time():
                training.update()
            self._steps.inc()


class TraceMl(Nobody):
    """TraceML (distribution traceml-ai), under its launcher: `traceml run`."""

    def begin(self) -> None:
        """Import and instrument."""
        import traceml_ai as traceml

        traceml.init(mode="auto")
        self._trace_step = traceml.trace_step

    def loop(self, training: Alone, steps: int) -> None:
        """Train for so many steps."""
        for _ in range(steps):
            batch = training.fetch()
            with self._trace_step(training.model):
                training.backward(training.forward(batch))
                training.update()


CONTENDERS: dict[str, type[Nobody]] = {
    "nobody": Nobody,
    "rankscope": Rankscope,
    "prometheus_client": PrometheusClient,
    "traceml": TraceMl,
}
