"""The reference pages are those that the code writes."""

import pytest

from docs.generate import PAGES, REFERENCE


@pytest.mark.parametrize("name", PAGES)
def test_a_page_made_from_the_code_is_up_to_date(name):
    assert (REFERENCE / name).read_text(encoding="utf-8") == PAGES[name](), "write it anew: make docs"
