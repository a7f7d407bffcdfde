"""A short part of the fuzzed names, overrides, folders and data."""

import pytest
from fuzz_names import WAYS, fuzz


@pytest.mark.parametrize("kind", range(len(WAYS)), ids=[way.__name__ for way in WAYS])
def test_mistyped_names_are_refused_briefly(tmp_path, monkeypatch, kind):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for number in range(kind, 25 * len(WAYS), len(WAYS)):
        (folder := tmp_path / str(number)).mkdir()
        assert fuzz(number, folder) is None, number
