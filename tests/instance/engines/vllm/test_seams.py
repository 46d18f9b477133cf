"""Another vLLM than the one checked is refused in one clear line."""

from __future__ import annotations

import pytest

from midstream.control.errors import BadInput
from midstream.instance.engines.vllm.finish import finish_text
from midstream.instance.engines.vllm.seams.version import check_absent, check_parameters, check_parts, check_version


@pytest.mark.parametrize("version", ["0.32", "0.32.0", "0.32.7"])
def test_the_checked_version_is_taken(version: str) -> None:
    check_version(version, is_untested_allowed=False)


@pytest.mark.parametrize("version", ["0.31.9", "0.33.0", "0.320.0", "1.0.0"])
def test_another_version_is_refused_unless_told_otherwise(version: str) -> None:
    with pytest.raises(BadInput, match=rf"vLLM {version} is installed, this adapter was checked with 0\.32"):
        check_version(version, is_untested_allowed=False)
    check_version(version, is_untested_allowed=True)


class Internal:
    """What a vLLM class may look like."""

    def there(self, known: int) -> int:
        return known


def test_a_missing_part_is_named() -> None:
    check_parts(Internal, ["there"])
    check_parameters(Internal.there, ["known"])
    check_absent(Internal, ["mig_freeze"])
    with pytest.raises(BadInput, match="Internal has no gone"):
        check_parts(Internal, ["there", "gone"])
    with pytest.raises(BadInput, match="there takes no unknown"):
        check_parameters(Internal.there, ["known", "unknown"])
    with pytest.raises(BadInput, match="has there of its own"):
        check_absent(Internal, ["there"])


@pytest.mark.parametrize(
    ("reason", "stop", "text"),
    [
        (0, None, "stop"),
        (0, 5, "stop:5"),
        (1, None, "length"),
        (2, None, "abort"),
        (3, None, "error:engine_failed"),
        (4, "repetition_detected", "repetition:repetition_detected"),
    ],
)
def test_the_end_of_a_run_in_words(reason: int, stop: int | str | None, text: str) -> None:
    assert finish_text(reason, stop) == text
