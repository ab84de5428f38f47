"""Every public name has a test."""

from __future__ import annotations

from public_names import ROOT, Name, file_with, public_names, words_in, words_of_tests


def test_every_public_name_stands_in_a_test() -> None:
    names, words = public_names(), words_of_tests(ROOT)
    assert len(names) > 300
    assert [name.title for name in names if file_with(name, words) is None] == []


def test_names_attributes_keywords_and_texts_are_words_and_imports_are_not() -> None:
    words = words_in("from bmt_core import sum_loss\nstore.load(1, strict=text['name'])")
    assert words == {"store", "load", "strict", "text", "name"}
    files = {"test_some.py": words}
    assert file_with(Name(("bmt.load", "bmt.store.load"), None), files) == "test_some.py"
    assert file_with(Name(("bmt.load",), None, "strict"), files) == "test_some.py"
    assert file_with(Name(("bmt.sum_loss",), None), files) is None
