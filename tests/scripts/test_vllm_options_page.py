"""The page of vLLM's options agrees with their table."""

from scripts import vllm_options_page


def test_page_is_up_to_date():
    assert vllm_options_page.DOCUMENT.read_text() == vllm_options_page.page(), (
        "run `python scripts/vllm_options_page.py`"
    )
