"""Loops over cases: every case runs once over both tiers, and failures are listed by name."""

from __future__ import annotations

import pytest

from support import cases
from support.cases import for_each


@pytest.fixture
def loop():
    seen = []

    @for_each("size", [1, 2, 3, 4, 5])
    @for_each("name, sign", [("a", 1), ("b", -1)])
    def test(fail, size, name, sign):
        seen.append((size, name, sign))
        assert not fail or size % 2, f"size {size}"

    return test, seen


def test_all_combinations_run_also_after_a_failure(loop, monkeypatch):
    test, seen = loop
    monkeypatch.setattr(cases, "part", "")
    with pytest.raises(
        AssertionError, match=r"4 of 10 cases failed; the first is above\n  2, a, 1: .*size 2"
    ) as caught:
        test(fail=True)
    assert "4, b, -1" in str(caught.value) and "3, " not in str(caught.value)
    assert len(set(seen)) == 10


def test_the_tiers_share_the_combinations(loop, monkeypatch):
    test, seen = loop
    assert cases.is_split(test)
    monkeypatch.setattr(cases, "part", cases.DIAGONAL)
    test(fail=False)
    assert seen == [(1, "a", 1), (2, "b", -1), (3, "a", 1), (4, "b", -1), (5, "a", 1)]
    monkeypatch.setattr(cases, "part", cases.OTHERS)
    test(fail=False)
    assert len(seen) == len(set(seen)) == 10


def test_a_case_is_found_by_its_name(loop, monkeypatch):
    test, seen = loop
    monkeypatch.setattr(cases, "part", "")
    monkeypatch.setattr(cases, "wanted", "3, b")
    test(fail=False)
    assert seen == [(3, "b", -1)]
