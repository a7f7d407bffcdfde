"""The short part of what nobody should type: names, overrides, folders, data."""

import pytest
from fuzz_names import WAYS, fuzz


@pytest.mark.parametrize("kind", range(len(WAYS)), ids=[way.__name__ for way in WAYS])
def test_what_is_typed_amiss_is_refused_in_a_few_words(tmp_path, monkeypatch, kind):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for number in range(kind, 25 * len(WAYS), len(WAYS)):
        (folder := tmp_path / str(number)).mkdir()
        assert fuzz(number, folder) is None, number
