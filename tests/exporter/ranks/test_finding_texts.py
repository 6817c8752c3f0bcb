"""The words of findings as labels: made once for each finding, and bounded."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from rankscope_exporter.diagnosis.findings import Candidate, Finding, Place
from rankscope_exporter.ranks.collectors.findings import TEXT_LIMIT, FindingTexts

LATE = Place(rank=3, group="0-3", node="node-a", gpu="3", uuid="GPU-3")


def verdict(ratio: float, run: str = "llm", node: str = "node-a", **of_finding: Any) -> Any:
    evidence = {"lag": ratio, "wait": 0.02, "group_wait": 0.3, "throttled": 1.0}
    late = Candidate("straggler", ratio, "throttled", LATE._replace(node=node), evidence)
    return SimpleNamespace(run=(run, "1000"), findings=[Finding(late, 0.0, 7.0, **of_finding)])


def texts(found: dict[tuple[str, ...], float]) -> list[tuple[str, ...]]:
    return [labels[-3:] for labels in found]


def test_a_finding_has_the_words_of_its_begin_until_its_severity_rises() -> None:
    described = FindingTexts()
    begin = texts(described.update([verdict(0.28)]))
    assert begin == [
        (
            "Rank 3 (node-a, GPU 3) slows down run llm by 28%: its GPU is throttled",
            "Wait in collectives 2%; of the others 30%; throttled 100% of the time.",
            "Check its cooling and power.",
        )
    ]
    assert texts(described.update([verdict(0.31)])) == begin
    assert "by 62%" in texts(described.update([verdict(0.62, is_critical=True)]))[0][0]


def test_a_finding_that_returns_is_described_again() -> None:
    described = FindingTexts()
    described.update([verdict(0.28)])
    assert described.update([]) == {}
    assert "by 31%" in texts(described.update([verdict(0.31)]))[0][0]


def test_no_text_is_longer_than_a_scrape_may_allow() -> None:
    longest = 200 * "\N{GRINNING FACE}"
    for text in texts(FindingTexts().update([verdict(0.28, run=longest, node=longest)]))[0]:
        assert len(text.encode()) <= TEXT_LIMIT
        assert text.isprintable()
