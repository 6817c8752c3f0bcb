"""The number of samples and tokens in a batch, whatever it is."""

from __future__ import annotations

from collections import UserDict

import pytest
import torch
from tests.trainer_hooks.probes.batches import Failing, Graphs, packed

from rankscope.probes.batch_size import size_of

IDS = torch.zeros(4, 16, dtype=torch.long)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_the_samples_of_a_nested_tensor_are_its_components(layout: torch.layout) -> None:
    nested = torch.nested.nested_tensor([torch.zeros(2, 4), torch.zeros(3, 4)], layout=layout)
    assert size_of([nested, torch.zeros(2)]) == (2, 0)


@pytest.mark.parametrize(
    ("batch", "size"),
    [
        (IDS, (4, 0)),
        ((IDS, torch.zeros(4)), (4, 0)),
        ([torch.tensor(3.0), {"pixels": IDS}], (4, 0)),
        ({"name": "x", "pixels": IDS[:3]}, (3, 0)),
        (UserDict({"input_ids": IDS}), (4, 64)),
        (({"input_ids": IDS}, torch.zeros(4)), (4, 64)),
        ((packed(3, 5, 4), torch.zeros(3)), (3, 0)),
        (IDS.numpy(), (4, 0)),
        (Graphs(batch_size=5), (5, 0)),
        (Graphs(batch_size=torch.Size([6])), (6, 0)),
        (Graphs(num_graphs=7), (7, 0)),
    ],
)
def test_the_size_of_a_batch(batch: object, size: tuple[float, float]) -> None:
    assert size_of(batch) == size


def test_a_deeply_nested_batch_is_not_searched_for_tokens() -> None:
    batch: list[object] = [{"input_ids": IDS}]
    assert size_of((batch,)).tokens == 64
    for _ in range(2000):
        batch = [batch]
    assert size_of(batch, 4) == (4, 0)


@pytest.mark.parametrize(
    "batch",
    [
        pytest.param((IDS[:2], IDS), id="a pair of different leading dimensions"),
        pytest.param({"input_ids": IDS, "cu_seqlens": torch.zeros(9)}, id="packed by the script"),
        pytest.param([{"pixels": IDS}, {"pixels": IDS}], id="a list of dicts"),
        pytest.param([IDS, IDS], id="a list of tensors of one shape"),
        pytest.param([IDS[:2], IDS], id="a ragged list"),
        pytest.param({"input_ids": [[1, 2], [3]]}, id="a dict of lists"),
        pytest.param(Graphs(x=IDS), id="an object"),
        pytest.param(Failing(), id="an object that raises"),
        pytest.param(list(range(1000)), id="a long list"),
        pytest.param("text", id="a text"),
        pytest.param(torch.tensor(1.0), id="a number"),
        pytest.param([], id="nothing"),
    ],
)
def test_the_samples_of_an_ambiguous_batch_are_unknown(batch: object) -> None:
    assert size_of(batch).samples is None
