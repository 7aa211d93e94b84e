"""The page of vLLM's options agrees with their table."""

import re

from cluster.config.schema import ClusterArgs, IngressConfig, PoolArgs, RouterConfig
from cluster.config.serve_file import HttpOptions
from scripts import vllm_options_page

STRUCTS = {
    "args": ClusterArgs,
    "args.ingress": IngressConfig,
    "args.router": RouterConfig,
    "http_options": HttpOptions,
}


def test_page_is_up_to_date():
    assert vllm_options_page.DOCUMENT.read_text() == vllm_options_page.page(), (
        "run `python scripts/vllm_options_page.py`"
    )


def test_the_keys_that_stand_in_place_of_options_exist():
    text = "\n".join(vllm_options_page.FRONT_END.values())
    keys = re.findall(r"`((?:args|http_options)[a-z_.]*)\.([a-z_]+)`", text)
    assert len(keys) > 20
    for struct, name in keys:
        assert name in STRUCTS[struct].__struct_fields__, f"{struct}.{name}"
    assert "drain_timeout_s" in PoolArgs.__struct_fields__
