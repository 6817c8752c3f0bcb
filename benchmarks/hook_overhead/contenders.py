"""The contenders: a plain loop, Rankscope, prometheus_client in a script of one's own, and TraceML.

Each is used as its documentation says. Packages are imported when a contender begins, because that is measured.
"""

from __future__ import annotations

from benchmarks.hook_overhead.trainings import Alone


class Plain:
    """The loop without instrumentation."""

    def begin(self) -> None:
        """Import and instrument."""

    def loop(self, training: Alone, steps: int) -> None:
        """Train for `steps` steps."""
        for _ in range(steps):
            training.backward(training.forward(training.fetch()))
            training.update()

    def end(self) -> None:
        """End the instrumentation, as the script does at its end."""

    def collectives(self) -> float:
        """Return the collectives so far; 0 if the contender does not count them."""
        return 0.0


class Rankscope(Plain):
    """The hook with every default probe."""

    def begin(self) -> None:
        import rankscope

        rankscope.instrument()

    def collectives(self) -> float:
        """Return the collectives so far, from the record."""
        from rankscope import attach
        from rankscope.record import layout

        attachment = attach.current()
        assert attachment is not None
        index = layout.INDEX["collectives"]
        return float(sum(attachment.writer.slots[index : index + len(layout.OPS)]))


class PrometheusClient(Plain):
    """A histogram of each phase's seconds and a counter of steps, in the training loop."""

    def begin(self) -> None:
        """Import, instrument, and serve the metrics in a thread."""
        from prometheus_client import Counter, Histogram, start_http_server

        seconds = Histogram("training_phase_seconds", "Seconds of a phase.", ["phase"])
        phases = ("data", "forward", "backward", "optimizer")
        self._data, self._forward, self._backward, self._optimizer = (seconds.labels(phase) for phase in phases)
        self._steps = Counter("training_steps", "Steps.")
        start_http_server(0, addr="127.0.0.1")

    def loop(self, training: Alone, steps: int) -> None:
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


class TraceMl(Plain):
    """TraceML (distribution traceml-ai), under its launcher: `traceml run`."""

    def begin(self) -> None:
        import traceml_ai as traceml

        traceml.init(mode="auto")
        self._trace_step = traceml.trace_step

    def loop(self, training: Alone, steps: int) -> None:
        for _ in range(steps):
            batch = training.fetch()
            with self._trace_step(training.model):
                training.backward(training.forward(batch))
                training.update()


CONTENDERS: dict[str, type[Plain]] = {
    "plain": Plain,
    "rankscope": Rankscope,
    "prometheus_client": PrometheusClient,
    "traceml": TraceMl,
}
