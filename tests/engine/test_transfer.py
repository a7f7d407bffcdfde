"""Uploads: lists of integers become tensors that nothing ever writes again."""

import threading

import pytest
import torch

from specdraft.eval.engine.transfer import SLAB, download, upload

CPU = torch.device("cpu")


def test_what_was_uploaded_stays_through_many_slabs():
    kept = [(n, upload(range(n, n + 97), CPU)) for n in range(5 * SLAB // 97)]
    for n, tensor in kept:
        assert tensor.tolist() == [*range(n, n + 97)]


@pytest.mark.parametrize("values", [[], [7], (1, 2), range(3), [*range(SLAB)], range(SLAB + 1)])
def test_any_sequence_of_any_length(values):
    tensor = upload(values, CPU)
    assert tensor.dtype == torch.long
    assert tensor.tolist() == [*values]


def test_threads_do_not_write_into_each_others_uploads():
    def fill(thread: int) -> None:
        held = [upload([thread] * 31, CPU) for _ in range(1000)]
        found[thread] = all(tensor.tolist() == [thread] * 31 for tensor in held)

    found = {}
    threads = [threading.Thread(target=fill, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == dict.fromkeys(range(4), True)


def test_an_upload_made_in_inference_mode_may_index_what_is_trained():
    with torch.inference_mode():
        for _ in range(3):  # one of them begins a slab
            upload(range(SLAB // 2), CPU)
    weight = torch.ones(3, requires_grad=True)
    weight.index_select(0, upload([2, 0], CPU)).sum().backward()
    assert weight.grad.tolist() == [1, 0, 1]


def test_no_number_is_cut_to_fit():
    with pytest.raises((TypeError, OverflowError)):
        upload([1.5], CPU)
    with pytest.raises((TypeError, OverflowError)):
        upload([1 << 63], CPU)
    assert upload([3], CPU).tolist() == [3]


def test_downloads_are_the_tensors_themselves_where_the_host_has_them():
    first, second = torch.ones(2), torch.zeros(1)
    assert download() == []
    assert [t.tolist() for t in download(first, second)] == [[1, 1], [0]]
