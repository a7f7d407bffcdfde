"""Uploads: lists of integers become tensors that are never overwritten."""

import threading

import pytest
import torch

from specdraft.eval.engine.transfer import SLAB, download, upload

CPU = torch.device("cpu")


def test_an_uploaded_tensor_is_never_overwritten_by_later_uploads():
    kept = [(n, upload(range(n, n + 97), CPU)) for n in range(5 * SLAB // 97)]
    for n, tensor in kept:
        assert tensor.tolist() == [*range(n, n + 97)]


@pytest.mark.parametrize("values", [[], [7], (1, 2), range(3), [*range(SLAB)], range(SLAB + 1)])
def test_any_sequence_of_any_length_can_be_uploaded(values):
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


def test_uploads_after_inference_mode_can_index_trained_weights():
    with torch.inference_mode():
        for _ in range(3):  # one of them starts a new slab
            upload(range(SLAB // 2), CPU)
    weight = torch.ones(3, requires_grad=True)
    weight.index_select(0, upload([2, 0], CPU)).sum().backward()
    assert weight.grad.tolist() == [1, 0, 1]


def test_a_number_that_is_no_64_bit_integer_is_an_error():
    with pytest.raises((TypeError, OverflowError)):
        upload([1.5], CPU)
    with pytest.raises((TypeError, OverflowError)):
        upload([1 << 63], CPU)
    assert upload([3], CPU).tolist() == [3]


def test_a_download_from_the_cpu_returns_the_tensors_themselves():
    first, second = torch.ones(2), torch.zeros(1)
    assert download() == []
    assert [*map(id, download(first, second))] == [id(first), id(second)]
