"""Errors of other libraries are reported in one line, even without a message."""

import pytest

from specdraft.models import target_files
from specdraft.recipes.errors import TargetError, in_a_line


@pytest.mark.parametrize(
    ("error", "line", "with_its_kind"),
    [
        (ValueError("no such file\nfurther down"), "no such file", "ValueError: no such file"),
        (TimeoutError(), "TimeoutError", "TimeoutError"),
        (OSError(" \n\t"), "OSError", "OSError"),
        (ValueError("x" * 999), "x" * 300, "ValueError: " + "x" * 300),
    ],
)
def test_an_error_is_reported_in_one_line(error: Exception, line: str, with_its_kind: str):
    assert in_a_line(error) == line
    assert in_a_line(error, kind=True) == with_its_kind


def test_a_hub_failure_without_a_message_is_reported_by_its_type(monkeypatch: pytest.MonkeyPatch):
    def silent(*_, **__):
        raise TimeoutError

    monkeypatch.setattr(target_files, "snapshot_download", silent)
    with pytest.raises(TargetError, match=r"the Hub did not give it \(TimeoutError\)"):
        target_files.model_folder("owner/name")
