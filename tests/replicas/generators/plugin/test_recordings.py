"""Recordings say what the documents do; a recording that was written anew is held to them too."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.replicas.generators.plugin.documents import Documents, read

RECORDINGS = sorted((Path(__file__).parent / "recordings").glob("*.txt"))


def check(path, change=None):
    text = path.read_text()
    if change is not None:
        before, after = change
        assert before in text
        text = text.replace(before, after, 1)
    Documents(path.stem.partition("-")[0]).check(read(text))


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.stem)
def test_a_recording_is_what_the_documents_say(path):
    check(path)


CONTRACT1 = "contract1-device"
WRONG = [
    # The start.
    (
        CONTRACT1,
        "enable_trace=False, can_sample_on_device=True)\nwarmup_model_decode",
        "enable_trace=True, can_sample_on_device=True)\nwarmup_model_decode",
    ),
    (CONTRACT1, "max_batch_size=4, num_blocks=4", "max_batch_size=4, num_blocks=17"),
    (CONTRACT1, "(17, 1, 32, 16), torch.bfloat16, 0)", "(17, 2, 32, 16), torch.bfloat16, 0)"),
    (CONTRACT1, "torch.bfloat16,\n    1)", "torch.bfloat16,\n    2)"),
    # A prompt.
    (CONTRACT1, "tokens=int32[2, 40]", "tokens=int64[2, 40]"),
    (CONTRACT1, "tokens=int32[2, 40]", "tokens=int32[2, 64]"),
    (CONTRACT1, "prompt_lens=numpy int64[2]", "prompt_lens=numpy int32[2]"),
    (CONTRACT1, "empty_slots=[0, 2]", "empty_slots=[0, 0]"),
    (CONTRACT1, "empty_slots=[0, 2]", "empty_slots=[0, 4]"),
    (CONTRACT1, "page_table=int32[2, 4] {[1, 6]", "page_table=int32[2, 4] {[1, 1]"),
    (CONTRACT1, "page_table=int32[2, 4] {[1, 6]", "page_table=int32[2, 4] {[1]"),
    (
        CONTRACT1,
        "presence_penalty=[0.0, 0.0], frequency_penalty=[0.0, 0.0],\n    "
        "repetition_penalty=[1.0, 1.0]",
        "frequency_penalty=[0.0, 0.0], presence_penalty=[0.0, 0.0],\n    "
        "repetition_penalty=[1.0, 1.0]",
    ),
    # A decode.
    (CONTRACT1, "start_pos=int32[4] [40, 70, 30, -1]", "start_pos=int32[4] [40, 70, 30, 0]"),
    (CONTRACT1, "start_pos=int32[4] [40, 70, 30, -1]", "start_pos=int32[4] [41, 70, 30, -1]"),
    (CONTRACT1, "{[152] [149] [75] [0]}", "{[152] [149] [75] [9]}"),
    (
        CONTRACT1,
        "[11] [0]}, kv_cache=<kv cache>, start_pos=int32[4] [40,",
        "[11] [3]}, kv_cache=<kv cache>, start_pos=int32[4] [40,",
    ),
    (CONTRACT1, "{[1, 6] [16, 5, 10]\n    [11] [0]}", "{[1, 6] [16, 5, 6]\n    [11] [0]}"),
    (CONTRACT1, "temperature=[0.7, 0.0, 0.7, 0.0]", "temperature=[0.7, 0.0, 0.7, 1.0]"),
    (CONTRACT1, "read_from_device=False", "read_from_device=True"),
    # Its commands.
    (
        CONTRACT1,
        "reload_inputs=True, reload_page_table=False",
        "reload_inputs=True, reload_page_table=True",
    ),
    (CONTRACT1, "reload_inputs=True", "reload_inputs=False"),
    (
        CONTRACT1,
        "reload_inputs=False, reload_page_table=False",
        "reload_inputs=True, reload_page_table=False",
    ),
    (
        CONTRACT1,
        "reload_inputs=False, reload_page_table=True",
        "reload_inputs=False, reload_page_table=False",
    ),
    (CONTRACT1, "reset_sampling_state=True", "reset_sampling_state=False"),
    (CONTRACT1, "reload_sampling_params=True", "reload_sampling_params=False"),
    (CONTRACT1, "slot_remap=int32[4] [0, 2, 1, 3]", "slot_remap=int32[4] [0, 1, 2, 3]"),
    (CONTRACT1, "slot_remap=int32[4] [0, 2, 1, 3]", "slot_remap=int32[4] [0, 2, 2, 3]"),
    ("contract1-host", "reload_inputs=True", "reload_inputs=False"),
    ("contract1-host", "reload_sampling_params=False", "reload_sampling_params=True"),
    ("legacy-device", "reset_batch=True", "reset_batch=False"),
    ("legacy-device", "reset_batch=False", "reset_batch=True"),
    ("legacy-device", ", reset_batch=True", ""),
    ("legacy-device", ", reset_batch=True", ", reset_batch=True, reload_inputs=True"),
    ("seed-host", "empty_slots=[0]", "empty_slots=[0], start_pos=int32[1] [0]"),
    ("seed-host", "read_from_device=True)\n  # two", "read_from_device=False)\n  # two"),
    # Outputs.
    (CONTRACT1, "read_decode_output(<output 1 on the device>, async_read=True)\n", ""),
    (
        CONTRACT1,
        "output 1 on the device>, is_tokens=True",
        "output 2 on the device>, is_tokens=True",
    ),
    (CONTRACT1, "is_tokens=True", "is_tokens=False"),
    (CONTRACT1, "async_read=True", "async_read=False"),
    # The end.
    ("chosen-host", "cleanup()\n", ""),
    ("chosen-host", "cleanup()\n", "cleanup()\ncleanup()\n"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "before", "after"), WRONG)
def test_what_the_documents_forbid_is_noticed(name, before, after):
    [path] = [path for path in RECORDINGS if path.stem == name]
    with pytest.raises(AssertionError):
        check(path, (before, after))


def test_two_rows_at_once_are_for_contract_1_alone():
    """A legacy class is given what one of contract 1 got there, and nothing else is changed."""
    texts = {path.stem: path.read_text() for path in RECORDINGS}
    begin, end = "prefill_forward", "  # c in slot 1"
    both = texts[CONTRACT1].partition(end)[0].partition(begin)[2]
    legacy = texts["legacy-device"]
    changed = legacy.partition(begin)[0] + begin + both + end + legacy.partition(end)[2]
    assert changed.count("empty_slots=[0, 2]") == 1
    with pytest.raises(AssertionError):
        Documents("legacy").check(read(changed))
