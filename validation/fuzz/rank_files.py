"""Check whether any rank file stops a scrape or causes an invalid label.

    python -m validation.fuzz.rank_files --files 1000000 --save

Real records are mutated at random: bits, slots, JSON, lengths, header, truncation. They are in a run directory in
batches, half of them with a live owner, and each batch is scraped as in production: read, collected, rendered.
Prometheus must accept everything rendered: no exception, finite and non-negative values, printable labels, no duplicate
series. If the fuzzer is root, the files belong to several users: then every series names its owner, and the lines of
the ranks fit into the page limit's estimate. File N depends only on the seed and N: `--first N --files 1` repeats a
failure.

With `--save` the next call continues where the last one ended. A file that is neither shown nor skipped ended too long
ago, or is an older record of a rank that is shown.
"""

from __future__ import annotations

import json
import logging
import math
import os
import random
import struct
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

from prometheus_client.core import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from validation.fuzz import fuzzing
from validation.fuzz.fuzzing import FuzzError

from rankscope.record import layout
from rankscope.record.layout import INDEX
from rankscope.record.text import LABEL_LIMIT
from rankscope_exporter.exposition.encoder import Encoder
from rankscope_exporter.exposition.metric import WrittenFamily
from rankscope_exporter.ranks.checks import LABELS
from rankscope_exporter.ranks.collectors.ranks import Ranks
from rankscope_exporter.ranks.metric import RANK_LABELS
from rankscope_exporter.ranks.rank import Scan
from rankscope_exporter.ranks.run_directory import RunDirectory
from rankscope_exporter.ranks.share import TextLimit

BOUND = "no exception, and only text that Prometheus accepts"
BATCH = 100  # below the limits of files and ranks of one owner, so that each file of a batch counts
OWNERS = (0, 1, 1000, 65_534, 2**32 - 2) if os.geteuid() == 0 else (os.geteuid(),)  # of the files, alternating
NOW = 1_800_000_000.0  # the reader's clock, and the end of every record
PARSED_EVERY = 20  # batches between two whose text is parsed again, which takes longer than the rest
ODD_NUMBERS = (0.0, -0.0, -1.0, 0.5, 1e18, 2.0**63, 1e308, -1e308, math.inf, -math.inf, math.nan, 5e-324)
ODD_TEXTS: tuple[Any, ...] = (
    *("", "\n", "\x00", "\x7f", "\x9b2J", "\u202e", "\ud800", "\\", '"', "{", "x" * 201, "é" * 200, "²", "٣", "-1"),
    *(None, True, 0, -1, 1e400, [], {}, ["other"], [""], [1], ["a", "a"], [f"p{n}" for n in range(40)]),
)
WORLDS = ("", *["1000"] * 12, "500", "0")  # a rank's world size; its number is below 1,000
STARTS = (-1e6, -100.0, -1.0, *[0.0] * 8, 30.0, 90.0, 1e12)
HOLDER = """
import fcntl, sys
files = [open(path, "r+b") for path in sys.argv[1:]]
for file in files:
    fcntl.lockf(file, fcntl.LOCK_EX)
print("locked", flush=True)
sys.stdin.read()
"""


def damaged(seed: int, number: int) -> bytes:
    """Return the bytes of file `number`: a valid record with one to four mutations."""
    choose = random.Random(f"{seed}/{number}")
    info: dict[str, Any] = dict.fromkeys(LABELS, "label")
    info |= {"run": f"run-{number}", "rank": str(number % 1000), "pid": "1", "world_size": choose.choice(WORLDS)}
    info |= {"phases": ["tokenize"], "probes_disabled": []}
    mutations: list[Callable[..., None]] = choose.choices(MUTATIONS, k=choose.randint(1, 4))
    for mutate in mutations:
        if mutate is _info:
            _info(choose, info)
    data = _record(choose, info)
    for mutate in mutations:
        if mutate is not _info:
            mutate(choose, data)
    return bytes(data)


def _record(choose: random.Random, info: dict[str, Any]) -> bytearray:
    data = bytearray(layout.SIZE)
    data[: layout.HEADER.size] = layout.header()
    text = json.dumps(info, ensure_ascii=choose.random() < 0.9).encode(errors="surrogatepass")[: layout.INFO_CAPACITY]
    data[layout.INFO_OFFSET : layout.INFO_OFFSET + len(text)] = text
    for index in range(layout.SLOTS):
        _store(data, index, float(choose.randrange(1000)))
    _store(data, INDEX["info_sequence"], 2.0)
    _store(data, INDEX["phase_since"], 1e4)  # later than the start
    _store(data, INDEX["info_place"], float(len(text)))
    _store(data, INDEX["phase"], float(choose.randrange(len(layout.PHASES))))
    _store(data, INDEX["ended"], choose.choice((layout.RUNNING, layout.FINISHED, layout.EXCEPTION)))
    _store(data, INDEX["ended_unix"], NOW)
    _store(data, INDEX["started_unix"], NOW + choose.choice(STARTS))
    return data


def _store(data: bytearray, index: int, value: float) -> None:
    struct.pack_into("d", data, layout.SLOTS_OFFSET + 8 * index, value)


def _bits(choose: random.Random, data: bytearray) -> None:
    for _ in range(choose.choice((1, 1, 2, 8, 64))):
        if data:
            data[choose.randrange(len(data))] ^= 1 << choose.randrange(8)


def _header(choose: random.Random, data: bytearray) -> None:
    data[: layout.HEADER.size] = choose.randbytes(layout.HEADER.size)


def _slot(choose: random.Random, data: bytearray) -> None:
    if len(data) >= layout.SIZE:
        odd = (*ODD_NUMBERS, struct.unpack("d", choose.randbytes(8))[0], choose.uniform(-100, 1e4))
        _store(data, choose.randrange(layout.SLOTS), choose.choice(odd))


def _json(choose: random.Random, data: bytearray) -> None:
    if len(data) >= layout.SIZE:
        at = layout.INFO_OFFSET + choose.randrange(400)
        junk = choose.choice((b"[" * 5000, b'{"a":' * 1000, b"\xff", b'"', b"\\ud800", b"9" * 5000, b"NaN", b"\x00"))
        data[at : at + len(junk)] = junk
        _store(data, INDEX["info_place"], float(choose.choice((100, 500, 6000, layout.INFO_CAPACITY))))


def _length(choose: random.Random, data: bytearray) -> None:
    del data[choose.randrange(layout.SIZE + 1) :]


def _growth(choose: random.Random, data: bytearray) -> None:
    data += choose.randbytes(choose.randrange(10_000))


def _last_words(choose: random.Random, data: bytearray) -> None:
    data[layout.LAST_WORDS_OFFSET : layout.LAST_WORDS_OFFSET + 64] = choose.randbytes(64)


def _info(choose: random.Random, info: dict[str, Any]) -> None:
    """Replace values of the JSON that the parser accepts and the checks must judge."""
    odd = choose.choice(ODD_TEXTS)
    name = choose.choice((*LABELS, "phases", "probes_disabled", "more", "tracker_ids", "tracker_urls"))
    info[name] = {choose.choice(layout.TRACKERS): odd} if name.startswith("tracker") and choose.random() < 0.9 else odd


OPENMETRICS = Encoder(openmetrics=True)
MUTATIONS = (_bits, _bits, _slot, _slot, _slot, _info, _info, _json, _last_words, _header, _length, _growth)


def check(families: Iterable[Metric]) -> None:
    """Raise FuzzError for the first series that Prometheus would refuse or that would mislead a user."""
    seen = set()
    for family in families:
        for sample in family.samples:
            series = (sample.name, *sorted(sample.labels.items()))
            if series in seen:
                raise FuzzError(f"{series} twice")
            seen.add(series)
            if not math.isfinite(sample.value) or sample.value < 0:
                raise FuzzError(f"{series} is {sample.value}")
            for value in sample.labels.values():
                if not isinstance(value, str) or not value.isprintable() or len(value) > LABEL_LIMIT:
                    raise FuzzError(f"{series} has the label {value!r}")


def check_owners(scan: Scan, families: Sequence[Metric], written: int) -> None:
    """Raise FuzzError for a series without a record, a start in the future, or more bytes than the limits assume."""
    keys = {rank.key for rank in scan.ranks}
    for family in families:
        for sample in family.samples if family.name.startswith("rankscope_rank_") else ():
            if tuple(sample.labels[label] for label in RANK_LABELS) not in keys:
                raise FuzzError(f"{sample} belongs to no record that is shown")
    for rank in scan.ranks:
        if rank.snapshot.unix_field("started_unix") > NOW + 60:
            raise FuzzError(f"{rank.key} started in the future")
    if written > (counted := sum(TextLimit(rank.snapshot).of(rank.snapshot) for rank in scan.ranks) + 1000):
        raise FuzzError(f"{written} bytes, but {counted} are assumed")


def scrape(run_directory: RunDirectory, parse: bool, ranks: Ranks | None = None) -> tuple[int, Counter[str]]:
    """Scrape once with all checks. Return the number of ranks, and the number of skipped files by reason."""
    scan = run_directory.scan()
    collected = (ranks or Ranks()).poll(scan)
    families = [_with_samples(family) for family in collected]
    check(families)
    check_owners(scan, families, sum(len(family.text) for family in collected if isinstance(family, WrittenFamily)))
    text = OPENMETRICS.render(collected).decode()
    if parse:
        check(text_string_to_metric_families(text))
    samples = {family.name: family.samples for family in families}
    skipped = samples["rankscope_exporter_rank_files_skipped"]
    return len(samples["rankscope_rank_info"]), Counter({s.labels["reason"]: int(s.value) for s in skipped})


def _with_samples(family: Metric) -> Metric:
    """Return the family with its samples made once: a written family parses its text at each access."""
    made = Metric(family.name, family.documentation, family.type)
    made.samples = family.samples
    return made


@contextmanager
def locked(paths: Sequence[Path]) -> Iterator[None]:
    """Hold the lock of these files in another process, as their ranks would."""
    command = [sys.executable, "-c", HOLDER, *map(str, paths)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        holder.stdout.readline()
        yield  # its input is closed at the end of the block, which ends it


def run(directory: Path, seed: int, first: int, files: int, parsed_every: int = PARSED_EVERY) -> Counter[str]:
    """Fuzz files `first` … `first + files`. Return the outcomes. Raises FuzzError that names the file."""
    paths = [directory / f"{number}.rank" for number in range(BATCH)]
    for number, path in enumerate(paths):
        path.touch()
        os.chown(path, OWNERS[number % len(OWNERS)], -1)
    run_directory, ranks = RunDirectory([directory], clock=lambda: NOW), Ranks()
    outcome: Counter[str] = Counter()
    with locked(paths[::2]):
        for batch, start in enumerate(range(first, first + files, BATCH)):
            numbers = range(start, min(start + BATCH, first + files))
            for path, number in zip_longest(paths, numbers):
                path.write_bytes(b"" if number is None else damaged(seed, number))
            try:
                shown, skipped = scrape(run_directory, batch % parsed_every == 0, ranks)
            except Exception as error:
                raise FuzzError(f"seed {seed}, {_failing_file(paths, seed, numbers)}: {error!r}") from error
            skipped["truncated"] -= BATCH - len(numbers)
            outcome += skipped + Counter(shown=shown)
    return outcome


def _failing_file(paths: Sequence[Path], seed: int, numbers: range) -> str:
    """Return which file of the batch fails, by trying each alone."""
    for path in paths:
        path.write_bytes(b"")
    for path, number in zip(paths, numbers, strict=False):
        path.write_bytes(damaged(seed, number))
        try:
            scrape(RunDirectory([path.parent], clock=lambda: NOW), parse=True)
        except Exception:
            return f"file {number}"
        path.write_bytes(b"")
    return f"files {numbers.start} to {numbers.stop - 1} together"


def main() -> None:
    logging.disable()  # one line a file would hide the report
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        fuzzing.main(__doc__, "files", partial(run, Path(directory)), "fuzz_rank_files", BOUND)


if __name__ == "__main__":
    main()
